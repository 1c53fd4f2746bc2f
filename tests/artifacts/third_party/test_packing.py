from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from llmc.artifacts.digest import Blob
from llmc.artifacts.store.store import Store
from llmc.artifacts.third_party.contents import KIND, read_contents
from llmc.artifacts.third_party.packing import pack
from llmc.errors import ArtifactError, InputError, UnknownNameError
from llmc.integrations import CACHES, compile_cache
from tests.artifacts.third_party.helpers import MAKERS, make_jax, make_neuron, make_vllm, packed, write


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_every_cache_has_a_maker_here() -> None:
    assert CACHES.names() == sorted(MAKERS)


@pytest.mark.parametrize("name", MAKERS)
def test_an_entry_says_what_is_in_it_and_reads_back(store: Store, tmp_path: Path, name: str) -> None:
    done = pack(store, compile_cache(name), MAKERS[name](tmp_path / "cache"), facts={"model": "m"})
    assert done.new and done.entry.key.kind == KIND
    found = store.lookup(done.entry.key, verify=True)
    assert found is not None
    assert read_contents(found, "x") == done.contents
    assert done.contents.facts["model"] == "m"


@pytest.mark.parametrize("name", MAKERS)
def test_the_same_content_is_the_same_entry_wherever_and_whenever_it_is_packed(
    store: Store, tmp_path: Path, name: str
) -> None:
    one = MAKERS[name](tmp_path / "one")
    first = packed(store, name, one)
    for path in one.rglob("*"):
        os.utime(path, (1, 1))
    shutil.copytree(one, tmp_path / "copy" / "two")
    if name != "vllm-neuron":  # command.txt names the folder that it was made in
        assert packed(store, name, MAKERS[name](tmp_path / "elsewhere" / "three")).key() == first.key()
    assert packed(Store(tmp_path / "other store"), name, tmp_path / "copy" / "two").key() == first.key()


def test_packing_again_keeps_a_signed_entry(store: Store, tmp_path: Path) -> None:
    from llmc.artifacts.store.entries import Entries

    folder = make_jax(tmp_path / "cache")
    entry = pack(store, compile_cache("jax"), folder).entry
    Entries(store.layout).adopt(entry._replace(signature={"signed": "by me"}))
    again = pack(store, compile_cache("jax"), folder)
    assert not again.new and again.entry.signature == {"signed": "by me"}


def test_a_folder_that_is_no_such_cache(store: Store, tmp_path: Path) -> None:
    make_jax(tmp_path / "cache")
    for name in ("vllm", "vllm-neuron", "gaudi"):
        with pytest.raises((InputError, ArtifactError), match=r"no cache of .* in it|cache"):
            pack(store, compile_cache(name), tmp_path)
    assert store.entries() == []


def test_an_unknown_cache_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="unknown cache 'sglang'; known: gaudi, jax, triton, vllm, vllm-neuron"):
        compile_cache("sglang")


def test_a_half_written_part_is_refused_by_name_or_left_out(store: Store, tmp_path: Path) -> None:
    folder = make_neuron(tmp_path / "cache")
    make_neuron(folder, "bad")
    (folder / "bad" / ".compilation_complete").unlink()
    with pytest.raises(ArtifactError, match=r"'bad' is not complete .*; wait for the server, or add --leave-out-inc"):
        pack(store, compile_cache("vllm-neuron"), folder)
    assert store.entries() == []
    done = pack(store, compile_cache("vllm-neuron"), folder, leave_out_incomplete=True)
    assert list(done.left_out) == ["bad"] and not any("bad" in path for path in done.contents.files)


def test_a_cache_that_changes_meanwhile_is_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_vllm(tmp_path / "cache")
    original = store.put_file

    def slow(path: Path) -> Blob:
        found = original(path)
        write(folder / "torch_compile_cache" / "0123456789" / "rank_0_0" / "late", "x")
        return found

    monkeypatch.setattr(store, "put_file", slow)
    with pytest.raises(ArtifactError, match="changed while the cache was packed; stop the server"):
        pack(store, compile_cache("vllm"), folder)
    assert store.entries() == []


def test_a_given_fact_cannot_contradict_the_cache(store: Store, tmp_path: Path) -> None:
    folder = make_vllm(tmp_path / "cache")
    with pytest.raises(InputError, match=r"says that config\.dtype is bfloat16, but --fact says float16"):
        pack(store, compile_cache("vllm"), folder, facts={"config.dtype": "float16"})


def test_a_recorded_version_can_be_corrected_or_taken_away(store: Store, tmp_path: Path) -> None:
    class Cache(type(compile_cache("jax"))):  # type: ignore[misc]
        packages = ("pytest",)

    folder = make_jax(tmp_path / "cache")

    def recorded(**facts: str) -> str | None:
        given = {name.replace("_", "."): value for name, value in facts.items()}
        return pack(store, Cache(), folder, facts=given).contents.facts.get("version.pytest")

    assert recorded() == pytest.__version__
    assert recorded(version_pytest="1.0") == "1.0"
    assert recorded(version_pytest="") is None


def test_nothing_is_unpickled_or_imported(store: Store, tmp_path: Path) -> None:
    folder = make_vllm(tmp_path / "cache")
    write(folder / "torch_compile_cache" / "0123456789" / "rank_0_0" / "backbone" / "computation_graph.py", "1 / 0")
    packed(store, "vllm", folder)
    assert not Path("/tmp/llmc-was-here").exists()


def test_an_entry_that_would_be_too_large_is_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmc.artifacts.third_party.packing.MAX_BYTES", 66_000)
    with pytest.raises(InputError, match=r"the names of 7 files take \d+ bytes, more than an entry has room for"):
        packed(store, "vllm", make_vllm(tmp_path / "cache"))


def test_progress_counts_every_byte(store: Store, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    done = pack(store, compile_cache("jax"), make_jax(tmp_path / "c"), progress=lambda *at: seen.append(at))
    assert seen[-1] == (done.contents.size, done.contents.size)
