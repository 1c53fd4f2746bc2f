from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from fsspec.config import conf

from tests.artifacts.oci.conftest import registry_port, start_registry
from tests.artifacts.remotes.conftest import Server, s3_server
from tests.artifacts.remotes.helpers import CREDENTIALS
from tests.cli.conftest import surround
from tests.docs.commands import ROOT, shown
from tests.docs.rehearsal import Rehearsal
from tests.docs.scenes import unit_of
from tests.docs.stand_ins import Kit

__all__ = ["registry_port", "s3_server", "start_registry"]

Rehearse: TypeAlias = Callable[[str | Path], Path]


@pytest.fixture(scope="session")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    """What is made once for all documents, and their store."""
    return Kit(tmp_path_factory.mktemp("kit"))


@pytest.fixture
def rehearse(
    kit: Kit, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest,
) -> Rehearse:  # fmt: skip
    """Runs the commands of a document, or of a section ("docs/page.md#section").

    The host has a registry and an S3 server where they name some.

    The folder stays until all tests end: bundles in the store that documents share record where their model lies.
    """

    def run(unit: str | Path) -> Path:
        document = ROOT / str(unit).partition("#")[0]
        lines = [one for one in shown(document) if isinstance(unit, Path) or unit_of(one) == unit]
        folder = tmp_path_factory.mktemp(document.stem)
        here = folder / "here"
        here.mkdir()
        surround(monkeypatch, here, kit.folder / "cache")
        monkeypatch.setenv("HOME", str(here))
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setenv("LLMC_TRUSTED_KEYS", str(folder / "trusted"))
        text = "\n".join(one.line for one in lines)
        registry = request.getfixturevalue("registry_port") if "llmc cache push oci://" in text else None
        if "s3://" in text:
            server: Server = request.getfixturevalue("s3_server")
            shutil.rmtree(models := server.folder.parent / "models", ignore_errors=True)
            models.mkdir()
            (folder / "models").symlink_to(models)
            key, secret = CREDENTIALS
            options = {"endpoint_url": f"http://127.0.0.1:{server.port}", "key": key, "secret": secret}
            monkeypatch.setitem(conf, "s3", options)
        failed = Rehearsal(str(unit), lines, here, kit, monkeypatch, capfd, registry).run()
        assert not failed, "\n".join(f"{where}\n{said}" for where, said in failed.items())
        return here

    return run
