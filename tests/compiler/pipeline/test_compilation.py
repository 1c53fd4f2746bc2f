"""`Compilation`: one target and one job for all that is done with it; resumed from its journal; files as plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import llmc as package
from llmc.artifacts.local.precompiled import FOLDER_NAMES
from llmc.buckets.encoding import encode_plan
from llmc.cli.main import main
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compilation import Compilation
from llmc.compiler.targets.fake import FakeTarget
from llmc.errors import InputError
from llmc.runtime.executors.fake import device as fake_device
from llmc.settings import Settings
from tests.toy import Toy

LIMITS = ("--max-model-len", "32")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[FakeTarget]:
    """The fake device's targets, as they are made."""
    built: list[FakeTarget] = []
    init = FakeTarget.__init__

    def noted(self: FakeTarget, *arguments: Any, **more: Any) -> None:
        built.append(self)
        init(self, *arguments, **more)

    monkeypatch.setattr(FakeTarget, "__init__", noted)
    return built


@pytest.mark.parametrize("device", ["fake", "fake:portable"])
@pytest.mark.parametrize("more", [(), ("--dry-run",), ("--emit", "lowered"), ("--emit", "key")], ids=str)
def test_a_command_line_opens_its_target_once(
    toy: Toy, opened: list[FakeTarget], device: str, more: tuple[str, ...]
) -> None:
    requested = ("compile", str(toy.model), "--device", device, *LIMITS, "-o", str(toy.bundle), *more)
    assert main([*requested, "--cache-dir", str(toy.store.root), "-q"]) == 0
    assert len(opened) == 1


def test_so_does_one_that_is_finished_here(toy: Toy, opened: list[FakeTarget], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_device, "here", fake_device.FakeGpu("fake-1"))
    result = package.compile(toy.model, toy.bundle, device="fake:portable", store=toy.store, max_model_len=32)
    assert result.on_target and len(opened) == 1


def test_its_key_dry_run_programs_and_bundle_share_a_target(toy: Toy, opened: list[FakeTarget]) -> None:
    requested = package.prepare(toy.model, device="fake", store=toy.store, plan=toy.plan)
    assert requested.dry_run()["cached"] == 0 and list(requested.programs("program", lambda _: None))
    key = requested.key()
    assert requested.compile(toy.bundle, lambda _: None).built
    assert requested.dry_run()["to_build"] == 0 and requested.key() == key
    assert len(opened) == 1


def test_what_was_interrupted_is_resumed(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    requested = package.prepare(toy.model, device="fake", cache_dir=toy.store.root, plan=toy.plan)

    def interrupted(event: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        requested.compile(toy.bundle, interrupted, resumable=True)
    again, output = Compilation.resumed(toy.bundle, toy.store.root, Settings())
    assert (again.plan, again.options, output) == (requested.plan, requested.options, toy.bundle)
    again.compile(output, lambda _: None, resumable=True)
    with pytest.raises(InputError, match="nothing to resume"):
        Compilation.resumed(toy.bundle, toy.store.root, Settings())


def test_a_plan_may_be_a_file_and_is_of_the_models_task(toy: Toy, tmp_path: Path) -> None:
    toy.plan.save(tmp_path / "plan.json")
    options = CompileOptions("fake")
    requested = Compilation.of(toy.model, options, toy.store, Settings(), plan=tmp_path / "plan.json")
    assert requested.plan == toy.plan
    with pytest.raises(InputError, match="the plan is for the task embed"):
        Compilation.of(toy.model, options, toy.store, Settings(), plan=encode_plan("embed", 32))


def test_a_device_with_a_folder_of_its_own_compiles_into_it(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = package.prepare(toy.model, device="fake", store=toy.store, plan=toy.plan)
    assert (elsewhere.location, elsewhere.default_output.suffix) == (None, ".llmc")
    monkeypatch.setitem(FOLDER_NAMES, "fake", "fake-artifacts")
    requested = package.prepare(toy.model, device="fake", store=toy.store, plan=toy.plan)
    assert requested.location == requested.default_output == toy.model / "fake-artifacts"
