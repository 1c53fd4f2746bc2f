from __future__ import annotations

import grp
import json
import os
import pwd
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.artifacts import ownership, verified_files
from llmc.artifacts.digest import digest_file
from llmc.artifacts.verified_files import FILE_NAME, FOLDER, VerifiedFiles
from tests.tiers import examples


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that has been still for a while."""
    path = tmp_path / "weights"
    path.write_bytes(b"w" * 1000)
    time.sleep(0.03)
    return path


def stamped(folder: Path, file: Path) -> VerifiedFiles:
    table = VerifiedFiles(folder)
    table.record(file, digest_file(file))
    table.save()
    return VerifiedFiles(folder)


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
    seen = verified_files.signature(file.stat())
    digest = digest_file(file)
    file.write_bytes(b"x" * 1000)
    time.sleep(0.03)
    table = VerifiedFiles(tmp_path)
    table.record(file, digest, seen)
    assert not table.verified(file, digest)


def test_a_file_that_changed_just_now_is_not_stamped(tmp_path: Path, file: Path) -> None:
    rewrite_same_bytes(file)
    table = VerifiedFiles(tmp_path)
    table.record(file, digest_file(file))
    assert not table.verified(file, digest_file(file)) or verified_files.settled(verified_files.signature(file.stat()))


def test_a_coarse_clock_needs_a_longer_rest() -> None:
    now = time.time_ns() // 1_000_000_000 * 1_000_000_000
    assert not verified_files.settled(verified_files.FileSignature(1, 1, 1, now, now))
    long_ago = now - 10_000_000_000
    assert verified_files.settled(verified_files.FileSignature(1, 1, 1, long_ago, long_ago))


def test_processes_keep_each_others_stamps(tmp_path: Path, file: Path) -> None:
    second = tmp_path / "second"
    second.write_bytes(b"2")
    time.sleep(0.03)
    one, other = VerifiedFiles(tmp_path), VerifiedFiles(tmp_path)
    one.record(file, digest_file(file))
    other.record(second, digest_file(second))
    one.save()
    other.save()
    table = VerifiedFiles(tmp_path)
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


def test_nothing_raises_where_nothing_can_be_written(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("a file, where a folder should be")
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "taken" / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    table = VerifiedFiles(tmp_path / "taken" / "below")
    table.record(file, digest_file(file))
    table.save()
    assert table.verified(file, digest_file(file))
    assert not VerifiedFiles(tmp_path / "taken" / "below").verified(file, digest_file(file))


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


@examples(60)
@given(TABLES)
def test_any_table_can_be_read(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("stamps")
    (folder / FILE_NAME).write_bytes(data)
    assert not VerifiedFiles(folder).verified(folder / FILE_NAME, "sha256:" + "0" * 64)


# Who may vouch


def open_to_all(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o002)


def open_to_a_group(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o020)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own cache."""
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every group has further users."""
    monkeypatch.setattr(ownership, "_is_private_group", lambda *_: False)


@pytest.mark.usefixtures("crowded")
@pytest.mark.parametrize("where", ["the table", "its folder"])
@pytest.mark.parametrize("opening", [open_to_all, open_to_a_group])
def test_a_table_that_others_may_write_is_not_believed(
    tmp_path: Path, file: Path, cache: Path, where: str, opening: Callable[[Path], None]
) -> None:
    table = stamped(tmp_path, file)
    assert table.verified(file, digest_file(file))
    opening(tmp_path / FILE_NAME if where == "the table" else tmp_path)
    assert not VerifiedFiles(tmp_path).verified(file, digest_file(file))


def test_a_table_of_another_user_is_not_believed(
    tmp_path: Path, file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamped(tmp_path, file)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert not VerifiedFiles(tmp_path).verified(file, digest_file(file))


def test_a_group_of_one_is_nobody_else(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "_is_private_group", lambda *_: True)
    open_to_a_group(tmp_path)
    assert stamped(tmp_path, file).verified(file, digest_file(file)) and (tmp_path / FILE_NAME).exists()


def test_the_group_that_a_system_makes_for_a_user_is_known() -> None:
    ownership._is_private_group.cache_clear()
    me = pwd.getpwuid(os.geteuid())
    group = grp.getgrgid(me.pw_gid)
    assert ownership._is_private_group(me.pw_gid, me.pw_uid) == (group.gr_name == me.pw_name)
    others = [item.gr_gid for item in grp.getgrall() if item.gr_name != me.pw_name]
    assert not any(ownership._is_private_group(gid, me.pw_uid) for gid in others)


@pytest.mark.usefixtures("crowded")
def test_what_was_verified_where_others_may_write_is_kept_in_the_users_own_cache(
    tmp_path: Path, file: Path, cache: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    open_to_a_group(shared)
    assert stamped(shared, file).verified(file, digest_file(file))
    (table,) = (cache / FOLDER).iterdir()
    assert table.stat().st_mode & 0o777 == 0o600 and table.parent.stat().st_mode & 0o777 == 0o700
    assert not list(shared.iterdir())


def test_a_cache_that_others_may_write_holds_no_stamps(
    tmp_path: Path, file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    cache.mkdir()
    open_to_all(cache)
    table = VerifiedFiles(tmp_path / "bundle", inside=False)
    table.record(file, digest_file(file))
    table.save()
    assert not list(cache.iterdir()) and len(list((tmp_path / "home" / "llmc" / FOLDER).iterdir())) == 1
    assert VerifiedFiles(tmp_path / "bundle", inside=False).verified(file, digest_file(file))


def test_tables_are_bounded(tmp_path: Path, file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified_files, "MOST_TABLES", 8)
    for number in range(20):
        table = VerifiedFiles(tmp_path / str(number), inside=False)
        table.record(file, digest_file(file))
        table.save()
        assert VerifiedFiles(tmp_path / str(number), inside=False).verified(file, digest_file(file))
    assert len(list((cache / FOLDER).iterdir())) <= 8
