"""The .pt2 of a package: rewritten to what llmc keeps of it, and refused when it could do more than it should."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.errors import ArtifactError
from llmc.runtime.executors.inductor.package import FOLDER, ROOT, check_archive, tidied

FIXED = {"archive_format": b"pt2", "archive_version": b"0", "byteorder": b"little", ".data/version": b"6\n"}
FILES = {
    **FIXED, ".data/serialization_id": b"0123", f"{FOLDER}cabc.wrapper.so": b"\x7fELF code",
    f"{FOLDER}cabc.wrapper_metadata.json": b"{}", f"{FOLDER}cdef.cubin": b"a kernel",
    f"{FOLDER}cabc.wrapper.cpp": b"// g++ /somewhere/of/the/host.cpp",
}  # fmt: skip
"""What torch 2.11 and 2.13 write, below a folder of the package's name."""


def zipped(files: Mapping[str, bytes], root: str = "any-name/", compression: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(root + name, content)
    return out.getvalue()


PACKAGE = tidied(zipped(FILES))


def test_sources_are_emptied_and_equal_contents_are_equal_bytes() -> None:
    with zipfile.ZipFile(io.BytesIO(PACKAGE)) as archive:
        kept = {name.removeprefix(ROOT): archive.read(name) for name in archive.namelist()}
    assert kept == {name: b"" if name.endswith(".cpp") else FILES[name] for name in FILES if "serial" not in name}
    changed = {**FILES, ".data/serialization_id": b"4567", f"{FOLDER}cabc.wrapper.cpp": b"// another host"}
    assert tidied(zipped(dict(reversed(changed.items())), root="other/")) == PACKAGE


@pytest.mark.parametrize(
    ("added", "words"),
    [
        ({"data/weights/weight_0": b"\x80\x04a pickle"}, "'step/data/weights/weight_0' is not allowed in it"),
        ({"data/sample_inputs/model.pt": b"\x80\x04a pickle"}, "is not allowed in it"),
        ({"models/model.json": b"{}"}, "is not allowed in it"),
        ({f"{FOLDER}../../../../etc/cron": b""}, "is not allowed in it"),
        ({f"{FOLDER}other/cabc.so": b""}, "is not allowed in it"),
        ({f"{FOLDER}model_compile_flags.sh": b""}, "is not allowed in it"),
        ({f"{FOLDER}second.so": b"\x7fELF"}, "it lacks its library"),
        ({f"{FOLDER}cabc.wrapper.cpp": b"int main;"}, "it has sources to be compiled"),
    ],
)
def test_what_a_package_may_not_have_is_refused(added: dict[str, bytes], words: str) -> None:
    files = {name: content for name, content in FILES.items() if "serial" not in name and not name.endswith(".cpp")}
    check_archive(zipped(files, ROOT), "bundle")
    with pytest.raises(ArtifactError, match=words) as refused:
        check_archive(zipped({**files, **added}, ROOT), "bundle/prompt")
    assert str(refused.value).startswith("bundle/prompt: not an AOTInductor package of llmc: ")
    assert "compile the bundle again" in str(refused.value)


@pytest.mark.parametrize("missing", [f"{FOLDER}cabc.wrapper.so", *FIXED])
def test_what_it_has_to_have_is_requested(missing: str) -> None:
    with pytest.raises(ArtifactError, match="it lacks its library, or a file"):
        tidied(zipped({name: content for name, content in FILES.items() if name != missing}))


def test_a_bomb_a_second_file_of_a_name_and_another_root_are_refused() -> None:
    with pytest.raises(ArtifactError, match="compressed"):
        check_archive(zipped({f"{FOLDER}a.so": b"0" * 99}, ROOT, zipfile.ZIP_DEFLATED), "bundle")
    with pytest.raises(ArtifactError, match="is not allowed in it"):
        check_archive(zipped(FIXED, "../"), "bundle")
    twice = io.BytesIO()
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(twice, "w") as archive:
        for _ in range(2):
            archive.writestr(f"{ROOT}{FOLDER}a.so", b"")
    with pytest.raises(ArtifactError, match="occurs twice"):
        check_archive(twice.getvalue(), "bundle")


@given(st.integers(0, len(PACKAGE) - 1))
def test_a_torn_package_is_one_error(length: int) -> None:
    with pytest.raises(ArtifactError, match="not an AOTInductor package"):
        check_archive(PACKAGE[:length], "bundle")


def test_no_flipped_bit_of_its_code_is_missed() -> None:
    start = PACKAGE.index(b"\x7fELF code")
    for at in range(start, start + len(b"\x7fELF code")):
        damaged = bytearray(PACKAGE)
        damaged[at] ^= 1
        with pytest.raises(ArtifactError, match=r"is damaged|Bad CRC"):
            check_archive(bytes(damaged), "bundle")
