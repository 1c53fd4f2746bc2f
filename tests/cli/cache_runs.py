"""`llmc cache` on a store, through the command line's own parser."""

from __future__ import annotations

import json
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from llmc.artifacts.store.store import Store
from llmc.cli.cache import app


def run(store: Store, *arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments), "--cache-dir", str(store.root)])


def output(store: Store, *arguments: object) -> str:
    result = run(store, *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def data(store: Store, *arguments: object) -> Any:
    return json.loads(output(store, *arguments, "--json"))


def error(store: Store, *arguments: object) -> Exception:
    result = run(store, *arguments)
    assert isinstance(result.exception, Exception), result.output
    return result.exception
