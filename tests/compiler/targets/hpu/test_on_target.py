"""Finishing a bundle on a Gaudi host: recipes recorded, carried, found again, or refused (over the fake bridge)."""

from __future__ import annotations

import io
import json
import logging
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.bundle.trust import RECIPES
from llmc.artifacts.store.store import Store
from llmc.compiler.pipeline.on_target import OnTargetResult, compile_on_target
from llmc.compiler.targets.hpu import on_target
from llmc.errors import ArtifactError, CompileError, DeviceError, LlmcError
from llmc.integrations.vllm_gaudi.cache import VARIABLE
from llmc.runtime import accelerators
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors.hpu.recipes import KV_BLOCKS, put_recipes
from llmc.runtime.startup.opening import EngineOptions, open_executor
from llmc.runtime.startup.outcome import WarmUpOutcome
from llmc.runtime.startup.warming import Warming
from llmc.settings import Settings
from tests.compiler.compiled import of_one_layer
from tests.fakes import gaudi
from tests.runtime.executors.hpu.conftest import MODES
from tests.tiers import full

FACTS = {"accelerator": "GAUDI2", "driver": "1.24.0", "synapse": "1.24.0", "mode": "PyTorch eager mode"}
EAGER = "PyTorch eager mode"

Host = Callable[..., Any]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """Makes this a Gaudi host, as a new process finds it; returns the fake's module `_accelerator`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(accelerators, "ROOT", tmp_path / "root")
    monkeypatch.setattr(on_target.subprocess, "Popen", InProcess)

    inner: list[pytest.MonkeyPatch] = []

    def start(mode: str = EAGER, accelerator: str = "GAUDI2", driver: str = "1.24.0") -> Any:
        monkeypatch.setenv(VARIABLE, "")
        for path, text in (
            ("sys/class/accel/accel0/device/device_type", accelerator), ("sys/module/habanalabs/version", driver),
        ):  # fmt: skip
            (tmp_path / "root" / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "root" / path).write_text(f"{text}\n")
        lazy, eager = MODES[mode]
        end()
        inner.append(pytest.MonkeyPatch())
        return gaudi.install(inner[0], lazy, LLMC_ENFORCE_EAGER=str(int(eager)))

    def end() -> None:
        for patch in inner:
            patch.undo()
        inner.clear()

    yield start
    end()


class InProcess:
    """The recording's process: here, with an accelerator of its own, as it sees it."""

    pid = 0

    def __init__(self, command: list[str], *, env: dict[str, str], stderr: Any, **_: Any) -> None:
        assert command[1:3] == ["-m", on_target.RECORDING]
        lines: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(VARIABLE, env[VARIABLE])
            patch.setattr("builtins.print", lambda text, file=None, flush=False: (
                lines.append(f"{text}\n") if file is None else stderr.write(f"{text}\n")
            ))  # fmt: skip
            self.code = on_target.main(command[3:])
        stderr.flush()
        import habana_frameworks.torch as bridge

        bridge._accelerator.reset()
        self.stdout = io.StringIO("".join(lines))

    def wait(self) -> int:
        return self.code

    def poll(self) -> int:
        return self.code


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer of llama with a prompt and a decode bucket, portable."""
    return of_one_layer(tmp_path_factory.mktemp("finish-hpu"), "hpu", "llama")


@pytest.fixture
def mine(bundle: Path, tmp_path: Path) -> Path:
    """A portable bundle of the test's own."""
    return shutil.copytree(bundle, tmp_path / "bundle", symlinks=True)


Finish = Callable[..., OnTargetResult]


@pytest.fixture
def finish(bundle: Path) -> Finish:
    """Finishes a bundle with a store that these tests share, or another one."""

    def finish(
        path: Path, events: list[Any] | None = None, store: Path | None = None, **given: Any
    ) -> OnTargetResult:  # fmt: skip
        on_progress = [].append if events is None else events.append
        return compile_on_target(path, Store(store or bundle.parent / "store"), on_progress, **given)

    return finish


def start(path: Path) -> tuple[list[str], list[str]]:
    """What a start of the bundle compiled while it opened, and after that."""
    opened = Bundle.open(path)
    executor = open_executor(opened, EngineOptions())
    try:
        outcome = WarmUpOutcome(executor, Warming(executor, opened.plan))
        outcome.run()
        assert not outcome.failed
        return list(executor.compilations.at_open), list(executor.compilations.compiled)
    finally:
        executor.close()


@full
def test_the_second_start_compiles_nothing(host: Host, finish: Finish, mine: Path) -> None:
    host()
    assert start(mine)[0], "a portable bundle is compiled at each start"
    host()
    events: list[Any] = []
    result = finish(mine, events, mine.parent / "store")
    assert result.built_for == FACTS and result.files == [RECIPES]
    manifest = BundleFiles.open(mine).manifest
    assert {item.state for item in manifest.executables} == {"native"}
    assert manifest.options[KV_BLOCKS] > 0 and manifest.options["tensor_parallel"] == 1
    assert [e.index for e in events if hasattr(e, "index")] == list(range(1, len(manifest.executables) + 1))
    host()
    assert start(mine) == ([], [])


@full
def test_it_is_built_once_for_hosts_of_a_kind(
    host: Host, finish: Finish, mine: Path, bundle: Path, tmp_path: Path
) -> None:
    host()
    finish(mine, store=mine.parent / "store")
    host()
    other = shutil.copytree(bundle, tmp_path / "other", symlinks=True)
    again = finish(other, store=mine.parent / "store")
    assert (again.built, again.reused) == (0, again.native)
    assert BundleFiles.open(other).manifest == BundleFiles.open(mine).manifest
    host(driver="1.24.1")
    assert finish(mine, store=mine.parent / "store").built == again.native


@full
@pytest.mark.parametrize(("given", "said"), [
    ({"accelerator": "GAUDI3"}, "another accelerator GAUDI2 (here: GAUDI3)"),
    ({"driver": "1.23.0"}, "another driver 1.24.0 (here: 1.23.0)"),
    ({"mode": "PyTorch lazy mode"}, "another mode PyTorch eager mode (here: PyTorch lazy mode)"),
])  # fmt: skip
def test_recipes_of_another_host_are_refused(
    host: Host, finish: Finish, mine: Path, given: dict[str, str], said: str
) -> None:
    host()
    finish(mine)
    host(**given)
    with pytest.raises(ArtifactError) as refused:
        open_executor(Bundle.open(mine), EngineOptions())
    assert said in str(refused.value)


def test_a_flag_for_another_mode_leaves_the_recipes_alone_and_says_so(
    host: Host, finish: Finish, mine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host()
    finish(mine)
    host()
    with caplog.at_level(logging.WARNING):
        opened = Bundle.open(mine)
        assert put_recipes(Bundle(opened.files, opened.settings), "torch.compile") is None
    assert "its recipes are for the mode PyTorch eager mode and do not work in torch.compile" in caplog.text


def test_the_pinned_cache_is_used_whatever_is_requested(host: Host, finish: Finish, mine: Path) -> None:
    host()
    finish(mine)
    host()
    pinned = BundleFiles.open(mine).manifest.options[KV_BLOCKS]
    opened = Bundle.open(mine)
    for prefixes in (0, 7):
        executor = open_executor(opened, EngineOptions(prefix_slots=prefixes))
        block = opened.plan.limits.block_size
        assert executor.slots * executor.capacity <= pinned * block < (executor.slots + 1) * executor.capacity
        executor.close()


@full
def test_a_recipe_that_was_cut_on_the_disk_is_replaced(host: Host, finish: Finish, mine: Path) -> None:
    host()
    finish(mine)
    host()
    folder = put_recipes(Bundle.open(mine), EAGER)
    assert folder is not None
    for recipe in folder.rglob("*.recipe"):
        recipe.write_text("rec")
    host()
    assert start(mine) == ([], [])


def test_recipes_that_the_bridge_does_not_find_are_warned_of(
    host: Host, finish: Finish, mine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host()
    finish(mine)
    accelerator = host()
    accelerator.VERSION, before = "1.24.9", accelerator.VERSION
    try:
        with caplog.at_level(logging.WARNING):
            assert start(mine)[0]
    finally:
        accelerator.VERSION = before
    assert "graphs were compiled at this start although the bundle has recipes" in caplog.text


@full
@pytest.mark.parametrize("mode", ["torch.compile", "HPU Graphs"])
def test_other_modes_have_recipes_of_their_own(host: Host, finish: Finish, mine: Path, mode: str) -> None:
    host(mode)
    assert finish(mine, verify="none").built_for["mode"] == mode
    host(mode)
    assert start(mine) == ([], [])


@full
def test_an_interrupt_keeps_the_recipes(
    host: Host, finish: Finish, mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host()
    before = BundleFiles.open(mine).manifest
    with monkeypatch.context() as patch:
        patch.setattr(on_target.RecipeCompiler, "_left", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            finish(mine, store=mine.parent / "store")
    assert BundleFiles.open(mine).manifest == before
    accelerator = host()
    compiled: list[str] = []
    accelerator.listeners.append(lambda name, _, what: compiled.append(what) if name == "graph_compilation" else None)
    try:
        monkeypatch.setattr("llmc.compiler.pipeline.on_target.agree", lambda *_: {"mode": "none"})
        finish(mine, store=mine.parent / "store")
    finally:
        accelerator.listeners.pop()
    assert compiled == []


def test_an_interrupted_recording_is_not_taken_for_a_whole_one(host: Host, mine: Path) -> None:
    host()

    def interrupt(number: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(CompileError, match="it was interrupted"):
        on_target.record(Bundle.open(mine), interrupt)


def test_without_the_software_the_way_out_is_named(finish: Finish, mine: Path) -> None:
    with pytest.raises(DeviceError, match=r"habana_frameworks.torch is not installed; install Intel's Gaudi software"):
        finish(mine)


def test_a_start_that_fails_is_reported_with_its_log(
    host: Host, finish: Finish, mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host()
    before = BundleFiles.open(mine).manifest
    monkeypatch.setenv("FAKE_HPU_MEMORY", "1000")
    with pytest.raises(LlmcError, match=r"it cannot be opened on this Gaudi device: .*; the log: /.*\.log"):
        finish(mine, store=mine.parent / "store")
    assert BundleFiles.open(mine).manifest == before


@full
def test_the_recording_is_a_process_of_its_own(
    host: Host, finish: Finish, mine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host()
    monkeypatch.setattr(on_target.subprocess, "Popen", subprocess.Popen)
    root = Path(__file__).parents[4]
    monkeypatch.setenv("PYTHONPATH", f"{root / 'tests' / 'fakes'}:{root}")
    finish(mine, store=mine.parent / "store")
    host()
    assert start(mine) == ([], [])
    assert not list((tmp_path / "cache").rglob("recording-*"))
    index = json.loads(Bundle.open(mine, Settings()).files.read(RECIPES))
    assert index["facts"]["synapse"] == "1.24.0" and len(index["files"]) >= 2
