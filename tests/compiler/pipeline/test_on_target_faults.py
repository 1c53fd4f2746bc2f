"""Finishing that is killed, runs twice at once, or finds no room: the bundle is whole, the old one or the new one."""

from __future__ import annotations

import errno
import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.store.store import Store
from llmc.compiler.pipeline.on_target import compile_on_target
from llmc.compiler.targets.fake_on_target import FakeOnTargetCompiler
from llmc.errors import ArtifactError, CapacityError
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors.fake import device
from llmc.runtime.executors.fake.device import FakeGpu
from tests.artifacts.helpers import Faults
from tests.toy import Toy


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    """A toy with a portable bundle, on a host with a GPU."""
    built = Toy.make(tmp_path)
    built.compile(device="fake:portable")
    monkeypatch.setattr(device, "here", FakeGpu())
    return built


def finish(toy: Toy) -> Any:
    return compile_on_target(toy.bundle, Store(toy.store.root), lambda _: None)


@pytest.mark.parametrize("after", [0, 3, 100])
def test_killed_the_bundle_is_as_before_and_a_rerun_goes_on(toy: Toy, after: int) -> None:
    """After so many executables; 100: while the bundle is verified."""
    before = BundleFiles.open(toy.bundle).manifest
    child = os.fork()
    if not child:
        calls = Counter[str]()

        def kill(event: Any) -> None:
            calls[type(event).__name__] += 1
            if calls["ExecutableReport"] > after or calls["VerifyReport"]:
                os.kill(os.getpid(), signal.SIGKILL)

        compile_on_target(toy.bundle, Store(toy.store.root), kill)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert BundleFiles.open(toy.bundle).manifest == before and not BundleFiles.open(toy.bundle).verify()
    result = finish(toy)
    assert result.reused >= min(after, len(before.executables)) and result.portable == 0


def test_of_two_at_once_one_builds_and_the_other_waits(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    sound, built = FakeOnTargetCompiler.compile, Counter[str]()

    def counted(self: FakeOnTargetCompiler, bundle: Bundle, executable: Any) -> bytes:
        built[executable.blob] += 1
        return sound(self, bundle, executable)

    monkeypatch.setattr(FakeOnTargetCompiler, "compile", counted)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: finish(toy), range(2))
    count = len(Bundle.open(toy.bundle).manifest.executables)
    assert set(built.values()) == {1} and first.built + second.built == count
    assert first.built_for == second.built_for and not BundleFiles.open(toy.bundle).verify()


@pytest.mark.parametrize(("call", "after"), [("fsync", 0), ("rename", 0)])
def test_no_room_for_the_bundle_leaves_the_old_one(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, call: str, after: int
) -> None:
    before = BundleFiles.open(toy.bundle).manifest
    with monkeypatch.context() as patch:
        Faults(patch, toy.bundle.parent / ".bundle").inject(call, errno.ENOSPC, after=after)
        with pytest.raises(CapacityError):
            finish(toy)
    assert BundleFiles.open(toy.bundle).manifest == before
    assert finish(toy).reused == len(before.executables)


def test_no_room_in_the_store_is_no_reason_to_fail(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    Faults(monkeypatch, toy.store.root).inject("fsync", errno.ENOSPC)
    assert finish(toy).portable == 0


def test_an_executable_that_was_damaged_is_named(toy: Toy) -> None:
    blob = BundleFiles.open(toy.bundle).manifest.executables[0].blob
    file = toy.bundle / "blobs" / "sha256" / blob.removeprefix("sha256:")
    file.unlink()
    file.write_bytes(b"torn")
    with pytest.raises(ArtifactError, match=r"executable prompt.*expected"):
        finish(toy)
