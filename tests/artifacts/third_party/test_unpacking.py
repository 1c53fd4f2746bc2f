"""Unpacking: byte for byte, each part in one step, with others at work, killed at any call, and on full disks."""

from __future__ import annotations

import errno
import os
import random
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from llmc.artifacts.atomic_write import UnwritableError
from llmc.artifacts.store.blobs import BlobMissingError
from llmc.artifacts.store.store import Store
from llmc.artifacts.third_party.contents import path_problem, paths_problem
from llmc.artifacts.third_party.packing import unpack
from llmc.errors import ArtifactError, CapacityError
from llmc.integrations import compile_cache
from tests.artifacts.helpers import Faults, child, finish
from tests.artifacts.third_party.helpers import (
    HASH,
    JAX_KEY,
    MAKERS,
    NEURON_KEY,
    content,
    make_jax,
    make_neuron,
    make_vllm,
    packed,
    write,
)
from tests.tiers import examples, full

PART = f"torch_compile_cache/{HASH}"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".*") if path.name.endswith((".new", ".old"))]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("there", ["absent", "empty", "others"])
def test_a_round_trip_gives_every_byte_back(store: Store, tmp_path: Path, name: str, there: str) -> None:
    source = MAKERS[name](tmp_path / "source")
    if name == "vllm-neuron":
        write(source / NEURON_KEY / "run", "x").chmod(0o755)
    contents = packed(store, name, source)
    location = tmp_path / "place" / "deep"
    if there != "absent":
        location.mkdir(parents=True)
    if there == "others":
        write(location / "unrelated" / "file", "mine")
    done = unpack(store, compile_cache(name), contents, location)
    found = content(location)
    if there == "others":
        assert found.pop("unrelated/file") == (b"mine", False)
    expected = {path: value for path, value in content(source).items() if path in contents.files}
    assert found == expected and expected
    assert done.placed and not (done.present or done.kept or done.replaced)
    assert hidden(tmp_path / "place") == []
    again = unpack(store, compile_cache(name), contents, location)
    assert again.present == done.placed and not again.placed


def test_what_is_put_in_place_can_be_written_by_its_server(store: Store, tmp_path: Path) -> None:
    contents = packed(store, "jax", make_jax(tmp_path / "source"))
    unpack(store, compile_cache("jax"), contents, tmp_path / "place")
    file = tmp_path / "place" / f"{JAX_KEY}-cache"
    file.write_bytes(b"changed by the server")
    assert store.is_intact(contents.files[f"{JAX_KEY}-cache"].blob), "nothing is shared with the store"


def test_empty_folders_come_back(store: Store, tmp_path: Path) -> None:
    source = make_vllm(tmp_path / "source")
    (source / PART / "rank_0_0" / "empty").mkdir()
    contents = packed(store, "vllm", source)
    unpack(store, compile_cache("vllm"), contents, tmp_path / "place")
    assert (tmp_path / "place" / PART / "rank_0_0" / "empty").is_dir()


def test_a_part_with_other_content_is_refused_before_anything_is_written(store: Store, tmp_path: Path) -> None:
    contents = packed(store, "vllm", make_vllm(tmp_path / "source"))
    location = tmp_path / "place"
    write(location / PART / "rank_0_0" / "backbone" / "computation_graph.py", "other")
    before = content(location)
    with pytest.raises(ArtifactError, match=rf"'{PART}' is there with other content; --keep leaves .* --replace puts"):
        unpack(store, compile_cache("vllm"), contents, location)
    assert content(location) == before and hidden(location) == []


def test_it_can_be_kept_and_the_rest_is_put_in_place(store: Store, tmp_path: Path) -> None:
    contents = packed(store, "vllm", make_vllm(tmp_path / "source"))
    location = tmp_path / "place"
    own = write(location / PART / "rank_0_0" / "own", "other")
    done = unpack(store, compile_cache("vllm"), contents, location, differing="keep")
    assert done.kept == (PART,) and len(done.placed) == 1
    assert own.read_text() == "other"
    assert sum(path.startswith(PART) for path in content(location)) == 1


def test_a_link_more_is_other_content(store: Store, tmp_path: Path) -> None:
    contents = packed(store, "vllm", make_vllm(tmp_path / "source"))
    unpack(store, compile_cache("vllm"), contents, tmp_path / "place")
    (tmp_path / "place" / PART / "rank_0_0" / "more").symlink_to(tmp_path)
    with pytest.raises(ArtifactError, match="with other content"):
        unpack(store, compile_cache("vllm"), contents, tmp_path / "place")


def test_progress_counts_what_is_copied_and_what_is_compared(store: Store, tmp_path: Path) -> None:
    contents = packed(store, "vllm", make_vllm(tmp_path / "source"))
    seen: list[tuple[int, int]] = []
    for _ in range(2):
        unpack(store, compile_cache("vllm"), contents, tmp_path / "place", progress=lambda *at: seen.append(at))
        assert seen.pop() == (contents.size, contents.size)
        seen.clear()


PARTS = st.text(
    st.characters(codec="utf-8", exclude_categories=["C", "Z"], exclude_characters="/\\"), min_size=1, max_size=9
)
TREES = st.dictionaries(
    st.lists(PARTS.filter(lambda part: path_problem(part) is None), min_size=1, max_size=4).map("/".join),
    st.tuples(st.binary(max_size=40), st.booleans()),
    max_size=8,
).filter(lambda files: paths_problem(files, ()) is None)


@examples(12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much])
@given(TREES, st.sampled_from(["absent", "empty"]))
def test_any_tree_comes_back_as_it_was(store: Store, files: dict[str, tuple[bytes, bool]], there: str) -> None:
    with tempfile.TemporaryDirectory() as built:
        source, location = Path(built, "source"), Path(built, "place")
        write(source / "123_ab_syn1.recipe", "r")
        write(source / "123_ab_syn1.metadata", "m")
        for path, (data, executable) in files.items():
            write(source / path, data).chmod(0o755 if executable else 0o644)
        contents = packed(store, "gaudi", source)
        if there == "empty":
            location.mkdir()
        unpack(store, compile_cache("gaudi"), contents, location)
        leaves_out = compile_cache("gaudi").leaves_out
        assert content(location) == {path: value for path, value in content(source).items() if not leaves_out(path)}


@pytest.mark.parametrize("there", ["a folder", "a file", "a link"])
def test_it_can_be_replaced_whatever_it_is(store: Store, tmp_path: Path, there: str) -> None:
    source = make_vllm(tmp_path / "source")
    contents = packed(store, "vllm", source)
    location, part = tmp_path / "place", tmp_path / "place" / PART
    outside = write(tmp_path / "outside" / "file", "mine")
    if there == "a folder":
        write(part / "old", "x")
    else:
        part.parent.mkdir(parents=True)
        part.symlink_to(outside.parent) if there == "a link" else part.write_text("x")
    with pytest.raises(ArtifactError, match="with other content"):
        unpack(store, compile_cache("vllm"), contents, location)
    done = unpack(store, compile_cache("vllm"), contents, location, differing="replace")
    assert done.replaced == (PART,)
    assert not part.is_symlink() and not (part / "old").exists()
    assert {path: value for path, value in content(source).items() if path in contents.files} == content(location)
    assert content(outside.parent) == {"file": (b"mine", False)}


def test_single_files_are_replaced_one_by_one(store: Store, tmp_path: Path) -> None:
    contents = packed(store, "jax", make_jax(tmp_path / "source"))
    location = make_jax(tmp_path / "place")
    write(location / f"{JAX_KEY}-cache", b"torn")
    write(location / "jit_other-" / "x", b"mine")
    with pytest.raises(ArtifactError, match=f"'{JAX_KEY}' is there with other content"):
        unpack(store, compile_cache("jax"), contents, location)
    done = unpack(store, compile_cache("jax"), contents, location, differing="replace")
    assert done.replaced == (JAX_KEY,)
    assert (location / f"{JAX_KEY}-cache").read_bytes().endswith(b"executable")
    assert (location / "jit_other-" / "x").exists()


def test_a_part_of_which_a_file_is_missing_is_completed(store: Store, tmp_path: Path) -> None:
    contents = packed(store, "jax", make_jax(tmp_path / "source"))
    location = make_jax(tmp_path / "place")
    (location / f"{JAX_KEY}-cache").unlink()
    assert unpack(store, compile_cache("jax"), contents, location).placed == (JAX_KEY,)


def test_a_damaged_store_puts_nothing_in_place(store: Store, tmp_path: Path) -> None:
    contents = packed(store, "vllm-neuron", make_neuron(tmp_path / "source"))
    blob = next(iter(contents.files.values())).blob
    path = store.path(blob)
    path.chmod(0o644)
    path.write_bytes(b"x" * blob.size)
    with pytest.raises(BlobMissingError):
        unpack(Store(store.root), compile_cache("vllm-neuron"), contents, tmp_path / "place")
    assert not (tmp_path / "place").exists() and hidden(tmp_path) == []


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize(("code", "error"), [(errno.ENOSPC, CapacityError), (errno.EACCES, UnwritableError)])
def test_a_full_or_closed_disk_leaves_no_part(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool, code: int, error: type[Exception]
) -> None:
    contents = packed(store, "vllm", make_vllm(tmp_path / "source"))
    location = tmp_path / "place"
    if there:
        write(location / "mine", "x")
    before = content(location)
    Faults(monkeypatch, tmp_path / ("place" if there else ".place")).inject("fsync", code, after=2)
    with pytest.raises(error, match=r"place: .*choose another folder with -o"):
        unpack(store, compile_cache("vllm"), contents, location)
    assert content(location) == before
    assert hidden(tmp_path) == []


def test_too_little_room_is_reported_before_anything_is_written(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    contents = packed(store, "jax", make_jax(tmp_path / "source"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
    with pytest.raises(CapacityError, match=r"needs \d+ bytes, 1 are free; free some space, or choose another folder"):
        unpack(store, compile_cache("jax"), contents, tmp_path / "place")
    assert not (tmp_path / "place").exists()


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_every_file_is_synced_before_it_gets_its_name(
    store: Store, tmp_path: Path, name: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = packed(store, name, MAKERS[name](tmp_path / "source"))
    location = tmp_path / "place"
    if there:
        location.mkdir()
    synced: set[int] = set()
    moved: set[int] = set()
    sync, rename = os.fsync, os.rename

    def noted_sync(fd: int) -> None:
        synced.add(os.fstat(fd).st_ino)
        sync(fd)

    def noted_rename(source: Path, target: Path) -> None:
        files = [path for path in (source, *source.rglob("*")) if path.is_file()]
        folders = [path for path in (source, *source.rglob("*")) if path.is_dir()]
        moved.update(path.stat().st_ino for path in files)
        assert {path.stat().st_ino for path in (*files, *folders)} <= synced
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "rename", noted_rename)
    unpack(store, compile_cache(name), contents, location)
    assert len(moved) == len(contents.files)
    assert {path.stat().st_ino for path in (location / file for file in contents.files)} == moved


CHILD = """
    import os, signal, sys
    from pathlib import Path
    from llmc.integrations import compile_cache
    from llmc.artifacts.third_party.contents import read_contents
    from llmc.artifacts.third_party.packing import unpack
    from llmc.artifacts.store.store import Store
    store, place, call, countdown = Store(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    (entry,) = store.entries()
    contents = read_contents(entry, "")
    original = getattr(os, call, None)
    def deadly(*arguments, **named):
        global countdown
        if countdown == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        countdown -= 1
        return original(*arguments, **named)
    if original is not None:
        setattr(os, call, deadly)
    print("ready", flush=True)
    unpack(store, compile_cache(contents.cache), contents, place, differing="replace")
    print("survived")
"""


@pytest.mark.parametrize("call", ["fsync", "rename"])
@pytest.mark.parametrize("there", ["absent", "empty", "old"])
def test_kill_9_at_any_call_leaves_whole_parts_and_unpacking_again_heals(
    store: Store, tmp_path: Path, call: str, there: str
) -> None:
    source = make_vllm(tmp_path / "source")
    contents = packed(store, "vllm", source)
    whole = {path: value for path, value in content(source).items() if path in contents.files}
    units = {compile_cache("vllm").unit(path) for path in whole}
    for countdown in (0, 2, 100):
        location = tmp_path / f"place{countdown}"
        if there == "empty":
            location.mkdir()
        if there == "old":
            write(location / PART / "old", "x")
        out, err = child(CHILD, store.root, location, call, countdown).communicate(timeout=60)
        assert not err, err
        found = (
            {path: value for path, value in content(location).items() if not path.startswith(".")}
            if location.exists()
            else {}
        )
        visible = {path: value for path, value in found.items() if "/." not in path}
        for unit in units:
            part = {path: value for path, value in visible.items() if path.startswith(unit + "/")}
            expected = {path: value for path, value in whole.items() if path.startswith(unit + "/")}
            assert part in (expected, {}, {f"{PART}/old": (b"x", False)}), f"{unit} is torn"
        unpack(store, compile_cache("vllm"), contents, location, differing="replace")
        assert content(location) == whole and hidden(tmp_path) == []
    assert "survived" in out


@full
def test_two_unpacks_at_once_both_end_well(store: Store, tmp_path: Path) -> None:
    source = make_vllm(tmp_path / "source")
    contents = packed(store, "vllm", source)
    whole = {path: value for path, value in content(source).items() if path in contents.files}
    for number in range(3):
        location = tmp_path / f"place{number}"
        for running in [child(CHILD, store.root, location, "-", -1) for _ in range(3)]:
            finish(running)
        assert content(location) == whole
    assert hidden(tmp_path) == []


def test_kill_9_at_any_moment_of_jax_leaves_whole_files(store: Store, tmp_path: Path) -> None:
    contents = packed(store, "jax", make_jax(tmp_path / "source"))
    location = tmp_path / "place"
    location.mkdir()
    chance = random.Random(5)
    for _ in range(3):
        victim = child(CHILD, store.root, location, "-", -1)
        assert victim.stdout is not None and victim.stdout.readline() == "ready\n"
        time.sleep(chance.random() * 0.01)
        victim.kill()
        victim.communicate()
        for path, (data, _) in content(location).items():
            if not path.startswith("."):
                assert data == store.get_bytes(contents.files[path].blob.digest)
    unpack(store, compile_cache("jax"), contents, location)
    assert set(content(location)) == set(contents.files)


def test_a_place_below_a_file_is_refused(store: Store, tmp_path: Path) -> None:
    contents = packed(store, "jax", make_jax(tmp_path / "source"))
    write(tmp_path / "file", "x")
    with pytest.raises(UnwritableError, match="choose another folder with -o"):
        unpack(store, compile_cache("jax"), contents, tmp_path / "file" / "place")


def test_a_link_to_a_folder_is_followed_and_stays(store: Store, tmp_path: Path) -> None:
    contents = packed(store, "jax", make_jax(tmp_path / "source"))
    (tmp_path / "real").mkdir()
    (tmp_path / "place").symlink_to("real")
    unpack(store, compile_cache("jax"), contents, tmp_path / "place")
    assert (tmp_path / "place").is_symlink() and len(content(tmp_path / "real")) == 2
