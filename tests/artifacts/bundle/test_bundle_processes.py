"""Several processes that write one bundle, some of them killed: there is always one complete bundle."""

from __future__ import annotations

import ctypes
import random
import time
from pathlib import Path

import pytest

from llmc.artifacts.bundle import writer as bundle_writer
from llmc.artifacts.bundle.reader import BundleFiles, recover
from llmc.artifacts.bundle.writer import write_bundle
from llmc.errors import ArtifactError
from tests.artifacts.helpers import child, finish, manifest, mounted, sources
from tests.tiers import default_cases

WRITER = """
    import sys
    from pathlib import Path
    from llmc.artifacts import folder_swap
    from llmc.artifacts.bundle import writer as bundle_writer
    from tests.artifacts.helpers import manifest, sources
    folder, name, rounds, exchange = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    if exchange == "without":
        folder_swap._exchange = lambda *_: False
    found = sources(folder / "model", mode=0o644)
    print("ready", flush=True)
    for count in range(rounds):
        bundle_writer.write_bundle(folder / "bundle", manifest(device=f"{name}-{count}"), found)
"""

EXCHANGE = ["with", "without"]


def check_only_the_bundle_remains(folder: Path) -> None:
    assert BundleFiles.open(folder / "bundle").verify() == []
    assert sorted(path.name for path in folder.iterdir()) == ["bundle", "model"]


@default_cases(1)
@pytest.mark.parametrize("exchange", EXCHANGE)
def test_two_processes_on_one_bundle_both_end_well(tmp_path: Path, exchange: str) -> None:
    sources(tmp_path / "model", mode=0o644)
    writers = [child(WRITER, tmp_path, name, 25, exchange) for name in "ab"]
    for writer in writers:
        finish(writer)
    check_only_the_bundle_remains(tmp_path)


def test_readers_always_find_a_complete_bundle(tmp_path: Path) -> None:
    sources(tmp_path / "model", mode=0o644)
    write_bundle(tmp_path / "bundle", manifest(), sources(tmp_path / "model"))
    writer = child(WRITER, tmp_path, "a", 40, "with")
    reads = 0
    while writer.poll() is None:
        files = BundleFiles.open(tmp_path / "bundle")
        assert files.manifest.target == "onnxruntime"
        reads += 1
    finish(writer)
    assert reads > 10


@default_cases(1)
@pytest.mark.parametrize("exchange", EXCHANGE)
def test_kill_9_at_any_moment_leaves_a_bundle(tmp_path: Path, exchange: str) -> None:
    found = sources(tmp_path / "model", mode=0o644)
    write_bundle(tmp_path / "bundle", manifest(), found)
    chance = random.Random(3)
    for _ in range(8):
        victim = child(WRITER, tmp_path, "a", 1000, exchange)
        assert victim.stdout is not None
        assert victim.stdout.readline() == "ready\n"
        time.sleep(chance.random() * 0.03)
        victim.kill()
        victim.communicate()
        assert BundleFiles.open(tmp_path / "bundle").verify() == []
    write_bundle(tmp_path / "bundle", manifest(device="last"), found)
    check_only_the_bundle_remains(tmp_path)


STEPS = """
    import os, signal, sys
    from pathlib import Path
    from llmc.artifacts import folder_swap
    from llmc.artifacts.bundle import writer as bundle_writer
    from tests.artifacts.helpers import manifest, sources
    folder, call, countdown, exchange = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    if exchange == "without":
        folder_swap._exchange = lambda *_: False
    found = sources(folder / "model", mode=0o644)
    original = getattr(os, call)
    def deadly(*arguments, **named):
        global countdown
        if countdown == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        countdown -= 1
        return original(*arguments, **named)
    setattr(os, call, deadly)
    bundle_writer.write_bundle(folder / "bundle", manifest(device="new"), found)
    print("survived")
"""


@default_cases(2)
@pytest.mark.parametrize("exchange", EXCHANGE)
@pytest.mark.parametrize("call", ["rename", "fsync", "rmdir"])
def test_kill_9_at_each_system_call_leaves_the_old_bundle_or_the_new(tmp_path: Path, call: str, exchange: str) -> None:
    found = sources(tmp_path / "model", mode=0o644)
    for countdown in range(0, 30, 2 if call == "fsync" else 1):
        write_bundle(tmp_path / "bundle", manifest(), found)
        survived = finish_or_die(STEPS, tmp_path, call, countdown, exchange)
        files = BundleFiles.open(tmp_path / "bundle")
        assert files.verify() == []
        assert files.manifest in (manifest(), manifest(device="new"))
        if survived:
            break
    assert survived
    assert countdown > 0
    write_bundle(tmp_path / "bundle", manifest(device="last"), found)
    check_only_the_bundle_remains(tmp_path)


def finish_or_die(script: str, *arguments: object) -> bool:
    out, err = child(script, *arguments).communicate(timeout=60)
    assert not err, err
    return out.strip() == "survived"


def test_a_bundle_lost_between_two_renames_is_put_back(tmp_path: Path) -> None:
    built = write_bundle(tmp_path / "bundle", manifest(), sources(tmp_path / "model"))
    built.rename(tmp_path / ".bundle.0123456789abcdef.old")
    assert BundleFiles.open(tmp_path / "bundle").verify() == []
    assert not recover(tmp_path / "bundle"), "nothing to do any more"


def test_a_half_deleted_old_bundle_is_not_put_back(tmp_path: Path) -> None:
    (tmp_path / ".bundle.0123456789abcdef.old" / "blobs").mkdir(parents=True)
    assert not recover(tmp_path / "bundle")
    with pytest.raises(ArtifactError, match="no such file"):
        BundleFiles.open(tmp_path / "bundle")


def test_the_sweep_spares_live_writers_and_other_bundles(tmp_path: Path) -> None:
    found = sources(tmp_path / "model")
    other = tmp_path / ".other.0123456789abcdef.new"
    other.mkdir()
    with bundle_writer.SWAP.sibling(tmp_path / "bundle") as live:
        write_bundle(tmp_path / "bundle", manifest(), found)
        assert live.is_dir()
    assert not live.exists()
    dead = tmp_path / ".bundle.0123456789abcdef.new"
    dead.mkdir()
    write_bundle(tmp_path / "bundle", manifest(device="other"), found)
    assert not dead.exists()
    assert other.exists()


MOUNT_POINT = """
    import sys
    from pathlib import Path
    from llmc.artifacts.bundle.writer import write_bundle
    from llmc.artifacts.atomic_write import UnwritableError
    from tests.artifacts.helpers import manifest, sources
    folder = Path(sys.argv[1])
    try:
        write_bundle(folder / "bundle", manifest(), sources(folder / "model"))
    except UnwritableError as error:
        print(error)
    write_bundle(folder / "bundle" / "inside", manifest(), sources(folder / "model"))
    print(sorted(path.name for path in folder.iterdir()))
"""


@pytest.mark.full
def test_a_mount_point_cannot_be_replaced_and_says_so(mounts: None, tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    before = mounted(f"mount -t tmpfs tmpfs {tmp_path}/bundle")
    message, names = finish(child(MOUNT_POINT, tmp_path, before=before)).splitlines()
    assert "mount point" in message
    assert names == "['bundle', 'model']"


def test_systems_that_cannot_exchange_names_take_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    found = sources(tmp_path / "model")
    for device in ("one", "two"):
        write_bundle(tmp_path / "bundle", manifest(device=device), found)
        assert BundleFiles.open(tmp_path / "bundle").manifest.device == device
    check_only_the_bundle_remains(tmp_path)
