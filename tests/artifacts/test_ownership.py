"""What others may change of a place: modes, owners, sticky folders, links, groups."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmc.artifacts import ownership
from llmc.artifacts.ownership import exposed, is_own, owners

STRANGER, GROUP = 54321, 54322
Give = Callable[..., None]


@pytest.fixture
def give(monkeypatch: pytest.MonkeyPatch) -> Give:
    """`give(path, gid=…)`: the path belongs to a stranger, or to a group, whoever runs the tests."""
    changed: dict[str, dict[int, int]] = {}

    def of(real: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def reported(path: Any, **more: Any) -> os.stat_result:
            seen = list(real(path, **more))
            for field, value in changed.get(os.fspath(path) if isinstance(path, (str, Path)) else "", {}).items():
                seen[field] = value
            return os.stat_result(seen)

        return reported

    monkeypatch.setattr(os, "stat", of(os.stat))
    monkeypatch.setattr(os, "lstat", of(os.lstat))

    def give(path: Path, uid: int | None = STRANGER, gid: int | None = None) -> None:
        requested = {stat.ST_UID: uid, stat.ST_GID: gid}
        changed[str(path)] = {field: value for field, value in requested.items() if value is not None}

    return give


@pytest.fixture
def location(tmp_path: Path) -> Path:
    """A bundle's folder, two folders below one that this user owns."""
    folder = tmp_path / "models" / "bundle"
    (folder / "blobs").mkdir(parents=True)
    (folder / "blobs" / "library").write_bytes(b"\x7fELF")
    return folder


def found(location: Path, **more: Any) -> str | None:
    problem = exposed(location, [location / "blobs" / "library"], **more)
    return None if problem is None else str(problem)


def test_a_place_of_this_user_is_not_exposed(location: Path) -> None:
    assert found(location) is None


@pytest.mark.parametrize("which", ["models", "models/bundle", "models/bundle/blobs", "models/bundle/blobs/library"])
@pytest.mark.parametrize("mode", [0o777, 0o772])
def test_each_folder_and_file_that_every_user_may_write_is_named(location: Path, which: str, mode: int) -> None:
    (location.parents[1] / which).chmod(mode)
    assert found(location) == f"{location.parents[1] / which} can be written by every user (mode {mode:o})"


@pytest.mark.parametrize("which", ["models", "models/bundle", "models/bundle/blobs", "models/bundle/blobs/library"])
def test_each_folder_and_file_of_another_user_is_named(location: Path, which: str, give: Give) -> None:
    give(location.parents[1] / which)
    assert found(location) == f"{location.parents[1] / which} belongs to user {STRANGER}"
    assert found(location, users={STRANGER}) is None, "the owner of a shared store"


def test_root_s_locations_are_trusted(location: Path, give: Give, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    for path in (*location.parents, location, location / "blobs", location / "blobs" / "library"):
        give(path, 0)
    assert found(location) is None


@pytest.mark.parametrize("which", ["models", "models/bundle/blobs/library"])
def test_a_group_with_other_members_counts_as_others(location: Path, which: str, give: Give) -> None:
    path = location.parents[1] / which
    path.chmod(0o770)
    give(path, None, GROUP)
    assert found(location) == f"{path} can be written by group {GROUP} (mode 770)"


def test_a_group_of_one_user_alone_is_that_user(location: Path, give: Give, monkeypatch: pytest.MonkeyPatch) -> None:
    import grp
    import pwd

    ownership._is_private_group.cache_clear()
    location.chmod(0o775)
    give(location, os.geteuid(), GROUP)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="me", pw_gid=GROUP))
    members: list[str] = []
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name="me", gr_mem=members))
    assert found(location) is None
    ownership._is_private_group.cache_clear()
    members.append("somebody")
    assert found(location) == f"{location} can be written by group me (mode 775)"
    ownership._is_private_group.cache_clear()


@pytest.mark.parametrize(("members", "trusted"), [([], True), (["root"], True), (["root", "somebody"], False)])
def test_root_s_group_is_root_as_long_as_nobody_else_is_in_it(
    monkeypatch: pytest.MonkeyPatch, members: list[str], trusted: bool
) -> None:
    import grp

    ownership._is_private_group.cache_clear()
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name="root", gr_mem=members))
    assert ownership._is_private_group(0, 1000) is trusted
    ownership._is_private_group.cache_clear()


def test_in_a_sticky_folder_it_counts_whose_the_entry_is(location: Path, give: Give) -> None:
    """As in /tmp: others may add entries, and cannot replace those of this user."""
    location.parent.chmod(0o1777)
    assert found(location) is None
    give(location)
    assert found(location) == f"{location} belongs to user {STRANGER}"


def test_a_sticky_folder_is_no_place_for_files_themselves(location: Path) -> None:
    """Others may add a file there that is not there yet."""
    location.chmod(0o1777)
    assert found(location) == f"{location} can be written by every user (mode 1777)"


def test_a_link_counts_where_it_lies_and_where_it_leads(tmp_path: Path, location: Path, give: Give) -> None:
    link = tmp_path / "here" / "link"
    link.parent.mkdir()
    link.symlink_to(location)
    assert exposed(link) is None
    link.parent.chmod(0o777)
    assert str(exposed(link)) == f"{link.parent} can be written by every user (mode 777)"
    link.parent.chmod(0o1777)
    assert exposed(link) is None
    give(link)
    assert str(exposed(link)) == f"{link} belongs to user {STRANGER}"
    give(link, os.geteuid())
    location.parent.chmod(0o777)
    assert str(exposed(link)) == f"{location.parent} can be written by every user (mode 777)"


def test_a_link_of_another_in_a_folder_of_this_user_leads_on(tmp_path: Path, location: Path, give: Give) -> None:
    link = tmp_path / "link"
    link.symlink_to(location)
    give(link)
    assert exposed(link) is None, "nobody else can replace it"


def test_relative_paths_and_links_that_go_up(tmp_path: Path, location: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "up").symlink_to("../models/bundle")
    monkeypatch.chdir(tmp_path / "far")
    assert exposed("up") is None
    assert exposed("up/../bundle") is None
    location.parent.chmod(0o777)
    for name in ("up", "up/../bundle", "../models/bundle", "./up/."):
        assert str(exposed(name)) == f"{location.parent} can be written by every user (mode 777)"


def test_what_is_missing_or_leads_in_a_circle_is_judged_as_far_as_it_goes(tmp_path: Path) -> None:
    assert exposed(tmp_path / "no" / "such") is None
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert exposed(tmp_path / "a") is None
    tmp_path.chmod(0o777)
    for name in ("no/such", "a"):
        assert str(exposed(tmp_path / name)) == f"{tmp_path} can be written by every user (mode 777)"
    tmp_path.chmod(0o755)


def test_a_read_only_mount_is_not_judged(location: Path, give: Give, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an image's volume, or one that another container wrote."""
    real = os.statvfs
    location.chmod(0o777)
    give(location / "blobs")

    def statvfs(path: Any) -> Any:
        return SimpleNamespace(f_flag=os.ST_RDONLY if str(path).startswith(str(location)) else real(path).f_flag)

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert found(location) is None


def test_a_trusted_folder_is_not_judged_and_those_beside_it_are(tmp_path: Path, location: Path) -> None:
    location.chmod(0o777)
    assert found(location, trusted=[tmp_path / "models"]) is None
    assert found(location, trusted=[location]) is None
    assert found(location, trusted=[tmp_path / "mod", location / "blobs", tmp_path / "models/bundle2"]) is not None
    (tmp_path / "link").symlink_to(location.parent)
    assert found(location, trusted=[tmp_path / "link"]) is None
    assert exposed(tmp_path / "link" / "bundle", trusted=[tmp_path / "models"]) is None


def test_each_problem_says_what_to_do(location: Path, give: Give) -> None:
    location.chmod(0o777)
    problem = exposed(location)
    assert problem is not None
    assert problem.remedy.startswith(f"chmod go-w {location}, or name the folder in LLMC_TRUSTED_FOLDERS")
    give(location)
    problem = exposed(location)
    assert problem is not None
    assert problem.fix == f"make it the user's that runs llmc (chown {location})"


def test_owners_of_folders(tmp_path: Path, give: Give) -> None:
    give(tmp_path)
    assert owners([tmp_path, tmp_path / "missing"]) == {STRANGER}
    assert not is_own(os.stat(tmp_path))  # noqa: PTH116
