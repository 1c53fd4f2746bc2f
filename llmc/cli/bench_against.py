"""`llmc bench BUNDLE --against PEERS`: a bundle and other engines on the same weights, in turn, on this host."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.cli.output import echo

if TYPE_CHECKING:
    from llmc.bench.peers.results import Comparison
    from llmc.bench.peers.scope import Scope


@dataclass(frozen=True)
class Flags:
    """The flags that go with --against; None where one was not given."""

    against: str
    peer_python: Path | None = None
    peer_models: Path | None = None
    model: str | None = None
    only: str | None = None
    rounds: int | None = None
    quick: bool = False
    traffic: Path | None = None
    scale: float | None = None
    threads: int | None = None
    output: Path | None = None
    plot: Path | None = None
    as_json: bool = False


def scope_of(flags: Flags) -> Scope:
    """What is to be measured; raises InputError."""
    from llmc.bench.peers.scope import KINDS, Scope

    scope = Scope(trace=flags.traffic)
    if flags.traffic is not None:
        scope = replace(scope, kinds=KINDS)
    if flags.scale is not None:
        scope = replace(scope, scale=flags.scale)
    if flags.only is not None:
        scope = scope.only(flags.only)
    if flags.quick:
        scope = scope.quick()
    return scope if flags.rounds is None else replace(scope, rounds=flags.rounds)


def run(bundle: str, flags: Flags) -> None:
    """Measure, then print the tables or the JSON document, and write what was asked for."""
    from llmc.artifacts.local.opening import open_store
    from llmc.bench.contenders import checkpoint_of, default_folder, make_ready
    from llmc.bench.peers import compare
    from llmc.bench.peers.catalogue import parse
    from llmc.bench.peers.environment import interpreter, require
    from llmc.bench.peers.report_text import text
    from llmc.buckets.render.page import check
    from llmc.cli.interrupts import end_incomplete, sigterm_interrupts
    from llmc.cli.output import StepProgress
    from llmc.runtime.bundle import Bundle
    from llmc.settings import Settings

    settings = Settings.from_environment()
    asked, scope, python = parse(flags.against), scope_of(flags), interpreter(flags.peer_python)
    if flags.plot is not None:
        check(flags.plot)
    opened = Bundle.open(bundle)
    require(asked, python)
    checkpoint = checkpoint_of(opened, flags.model, open_store(None, settings))
    folder = flags.peer_models or default_folder(settings, checkpoint)
    hidden = flags.as_json and not sys.stderr.isatty()
    with StepProgress("make the peers' models", hidden) as made:
        ready = make_ready(
            {"llmc": opened}, asked, checkpoint, folder, python, lambda form: made(form, 0, len(asked)),
            "quality" in scope.kinds,
        )  # fmt: skip
    logs = folder / "logs"
    with StepProgress("measure", hidden) as progress, sigterm_interrupts():
        found = compare.run(
            ready.contenders, scope, model=ready.model, threads=flags.threads or settings.threads,
            vocabulary=ready.vocabulary, logs=logs, progress=progress, reference=ready.reference, texts=ready.texts,
            weights=ready.weights,
        )  # fmt: skip
    _write(found, flags)
    echo(json.dumps(found.to_dict()) + "\n" if flags.as_json else text(found), nl=False)
    end_incomplete(found.unfinished)


def _write(found: Comparison, flags: Flags) -> None:
    from llmc.bench.peers import page

    if flags.output is not None:
        found.save(flags.output)
        echo(f"wrote {flags.output}", err=True)
    if flags.plot is not None:
        page.draw(flags.plot, [found])
        echo(f"wrote {flags.plot}", err=True)
