from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.artifacts import stamps
from llmc.artifacts.digest import digest_file
from llmc.artifacts.stamps import FILE_NAME, Stamps


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that has been still for a while."""
    path = tmp_path / "weights"
    path.write_bytes(b"w" * 1000)
    time.sleep(0.03)
    return path


def stamped(folder: Path, file: Path) -> Stamps:
    table = Stamps(folder)
    table.record(file, digest_file(file))
    table.save()
    return Stamps(folder)


def test_a_stamp_outlives_the_process(tmp_path: Path, file: Path) -> None:
    table = stamped(tmp_path, file)
    assert table.verified(file, digest_file(file))
    assert not table.verified(file, "sha256:" + "0" * 64)
    assert not table.verified(tmp_path / "other", digest_file(file))


def test_a_stamp_holds_through_links_to_the_file(tmp_path: Path, file: Path) -> None:
    table = stamped(tmp_path, file)
    (tmp_path / "link").symlink_to(file)
    assert table.verified(tmp_path / "link", digest_file(file))


def rewrite_same_bytes(path: Path) -> None:
    path.write_bytes(path.read_bytes())


def flip_and_restore_mtime(path: Path) -> None:
    before = path.stat()
    path.write_bytes(b"x" * before.st_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_with_twin(path: Path) -> None:
    twin = path.with_name("twin")
    shutil.copy2(path, twin)
    twin.replace(path)


def swap_link(path: Path) -> None:
    other = path.with_name("other")
    path.rename(other)
    path.symlink_to(shutil.copy2(other, path.with_name("copy")))


@pytest.mark.parametrize("change", [rewrite_same_bytes, flip_and_restore_mtime, replace_with_twin, swap_link])
def test_every_change_through_the_file_system_is_noticed(tmp_path: Path, file: Path, change) -> None:  # type: ignore[no-untyped-def]
    digest = digest_file(file)
    table = stamped(tmp_path, file)
    change(file)
    assert not table.verified(file, digest)


def test_a_file_that_changed_while_it_was_hashed_is_not_stamped(tmp_path: Path, file: Path) -> None:
    seen = stamps.signature(file.stat())
    digest = digest_file(file)
    file.write_bytes(b"x" * 1000)
    time.sleep(0.03)
    table = Stamps(tmp_path)
    table.record(file, digest, seen)
    assert not table.verified(file, digest)


def test_a_file_that_changed_just_now_is_not_stamped(tmp_path: Path, file: Path) -> None:
    rewrite_same_bytes(file)
    table = Stamps(tmp_path)
    table.record(file, digest_file(file))
    assert not table.verified(file, digest_file(file)) or stamps.settled(stamps.signature(file.stat()))


def test_a_coarse_clock_needs_a_longer_rest() -> None:
    now = time.time_ns() // 1_000_000_000 * 1_000_000_000
    assert not stamps.settled(stamps.Signature(1, 1, 1, now, now))
    long_ago = now - 10_000_000_000
    assert stamps.settled(stamps.Signature(1, 1, 1, long_ago, long_ago))


def test_processes_keep_each_others_stamps(tmp_path: Path, file: Path) -> None:
    second = tmp_path / "second"
    second.write_bytes(b"2")
    time.sleep(0.03)
    one, other = Stamps(tmp_path), Stamps(tmp_path)
    one.record(file, digest_file(file))
    other.record(second, digest_file(second))
    one.save()
    other.save()
    table = Stamps(tmp_path)
    assert table.verified(file, digest_file(file))
    assert table.verified(second, digest_file(second))


def test_stamps_of_files_that_are_gone_are_dropped(tmp_path: Path, file: Path) -> None:
    stamped(tmp_path, file)
    second = tmp_path / "second"
    second.write_bytes(b"2")
    time.sleep(0.03)
    file.unlink()
    stamped(tmp_path, second)
    assert list(json.loads((tmp_path / FILE_NAME).read_bytes())["files"]) == [str(second)]


def test_nothing_raises_where_nothing_can_be_written(tmp_path: Path, file: Path) -> None:
    (tmp_path / "taken").write_text("a file, where a folder should be")
    table = Stamps(tmp_path / "taken" / "below")
    table.record(file, digest_file(file))
    table.save()
    assert table.verified(file, digest_file(file))
    assert not Stamps(tmp_path / "taken" / "below").verified(file, digest_file(file))


def test_saving_leaves_one_file(tmp_path: Path, file: Path) -> None:
    stamped(tmp_path, file)
    assert {path.name for path in tmp_path.iterdir()} == {FILE_NAME, "weights"}


JSON = st.recursive(
    st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)
ROWS = st.dictionaries(st.text(), st.lists(st.integers() | st.text(), max_size=7))
TABLES = st.one_of(
    st.binary(),
    JSON.map(lambda value: json.dumps(value).encode()),
    ROWS.map(lambda rows: json.dumps({"schema": 1, "files": rows}).encode()),
)


@settings(max_examples=60, deadline=None)
@given(TABLES)
def test_any_table_can_be_read(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("stamps")
    (folder / FILE_NAME).write_bytes(data)
    assert not Stamps(folder).verified(folder / FILE_NAME, "sha256:" + "0" * 64)
