from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from llmc.artifacts.third_party.contents import require_unchanged, scan_tree
from llmc.errors import ArtifactError, InputError
from tests.artifacts.third_party.helpers import write


def no(_: str) -> bool:
    return False


def test_files_by_path_and_folders_that_are_empty(tmp_path: Path) -> None:
    write(tmp_path / "b" / "run.sh", "x").chmod(0o755)
    write(tmp_path / "a", "xyz")
    (tmp_path / "c" / "d").mkdir(parents=True)
    tree = scan_tree(tmp_path, no)
    assert list(tree.files) == ["a", "b/run.sh"]
    assert [(file.size, file.executable) for file in tree.files.values()] == [(3, False), (1, True)]
    assert tree.folders == ("c/d",)


def test_what_is_left_out_is_not_even_looked_at(tmp_path: Path) -> None:
    (tmp_path / "link.lock").symlink_to("/etc/passwd")
    write(tmp_path / "out" / "a", "x")
    assert scan_tree(tmp_path, lambda path: path in {"out", "link.lock"}).files == {}


@pytest.mark.parametrize("target", ["/etc/passwd", "nowhere", ".."])
def test_a_link_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(ArtifactError, match=r"link: a symbolic link; only files can be packed"):
        scan_tree(tmp_path, no)


def test_a_pipe_and_a_socket_are_refused_without_being_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArtifactError, match="pipe: a pipe; only files"):
        scan_tree(tmp_path, no)
    (tmp_path / "pipe").unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        with pytest.raises(ArtifactError, match="a socket; only files"):
            scan_tree(tmp_path, no)


def test_a_device_is_refused() -> None:
    with pytest.raises(ArtifactError, match=r"/dev/\S+: a device|symbolic link"):
        scan_tree(Path("/dev"), lambda path: path not in {"null", "zero"})


@pytest.mark.parametrize("name", [b"caf\xe9", b"a\nb", b"a\x1b[0m"])
def test_a_name_that_cannot_be_shown_is_refused(tmp_path: Path, name: bytes) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).touch()
    with pytest.raises(ArtifactError, match="cannot be packed: it has characters that cannot be printed"):
        scan_tree(tmp_path, no)


def test_a_tree_of_too_many_files_is_refused_while_it_is_read(tmp_path: Path) -> None:
    for number in range(6):
        write(tmp_path / f"{number}", "")
    assert len(scan_tree(tmp_path, no, limit=6).files) == 6
    with pytest.raises(InputError, match="more than 5 files; pack its parts one by one"):
        scan_tree(tmp_path, no, limit=5)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder; name the folder that the server keeps its cache in"):
        scan_tree(tmp_path / "none", no)


@pytest.mark.parametrize("change", ["grow", "rewrite", "add", "remove", "replace by a link", "add a folder"])
def test_a_tree_that_changes_is_noticed(tmp_path: Path, change: str) -> None:
    file = write(tmp_path / "a", "abc")
    before = scan_tree(tmp_path, no)
    require_unchanged(before, no)
    if change == "grow":
        write(file, "abcd")
    elif change == "rewrite":
        os.utime(file, ns=(0, 0))
    elif change == "add":
        write(tmp_path / "b", "")
    elif change == "remove":
        file.unlink()
    elif change == "add a folder":
        (tmp_path / "c").mkdir()
    else:
        file.unlink()
        file.symlink_to("/etc/passwd")
    with pytest.raises(ArtifactError, match=r"changed while the cache was packed|a symbolic link"):
        require_unchanged(before, no)
