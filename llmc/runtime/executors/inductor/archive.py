"""The .pt2 of an AOTInductor package: a zip with a shared library of code, rewritten and checked without opening it.

What torch writes and reads of it (pytorch/pytorch v2.11.0 and v2.13.0, torch/export/pt2_archive/_package.py and
torch/csrc/inductor/aoti_package/model_package_loader.cpp; both were run here):

    ROOT/archive_format, archive_version, byteorder, .data/version    a few bytes each
    ROOT/data/aotinductor/model/NAME.wrapper.so                       the code, which torch opens as a library
    ROOT/data/aotinductor/model/NAME.…_metadata.json                  words: platform, device, compute capability
    ROOT/data/aotinductor/model/*.cubin                               a CUDA kernel each
    ROOT/data/aotinductor/model/NAME.wrapper.cpp                      sources, and commands with the paths of the host

torch's loader runs a compiler where a package has sources and no library. `torch._inductor.aoti_load_package` looks for
exported programs, sample inputs and weights besides, and unpickles them. So none of these is allowed here. Sources are
emptied: torch 2.11 looks for the metadata by their name.
"""

from __future__ import annotations

import io
import re
import zipfile
import zlib

from llmc.errors import ArtifactError

ROOT = "step/"
FOLDER = "data/aotinductor/model/"
NAME = "model"
"""What torch calls a package's only model."""

MAX_BYTES = 4 << 30
_FIXED = ("archive_format", "archive_version", "byteorder", ".data/version")
_DROPPED = (".data/serialization_id",)
_MEMBER = re.compile(r"[A-Za-z0-9_.-]{1,200}\.(?:so|cubin|cpp|json)")
_LIBRARY, _SOURCE = ".so", ".cpp"


def tidied(data: bytes) -> bytes:
    """A package as torch wrote it, with sources emptied and entries in order: equal contents give equal bytes.

    Raises ArtifactError for one that has anything that `check` refuses.
    """
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(out, "w") as written:
        for info in sorted(archive.infolist(), key=lambda i: i.filename):
            name = info.filename.partition("/")[2]
            if name not in _DROPPED:
                content = b"" if name.endswith(_SOURCE) else archive.read(info)
                written.writestr(zipfile.ZipInfo(ROOT + name), content)
    check(out.getvalue(), "what torch wrote")
    return out.getvalue()


def check(data: bytes | memoryview, source: str) -> None:
    """Raise ArtifactError, naming `source` and what is wrong, unless `data` is such a package; nothing of it is run."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            infos = archive.infolist()
            names = [info.filename for info in infos]
            if sum(info.file_size for info in infos) > MAX_BYTES:
                raise ValueError(f"it unpacks to more than {MAX_BYTES >> 30} GiB")
            if len(set(names)) < len(names):
                raise ValueError("a file occurs twice")
            if odd := [name for name in names if not _known(name)]:
                raise ValueError(f"{odd[0]!r:.80} has no place in it")
            if any(info.compress_type != zipfile.ZIP_STORED for info in infos):
                raise ValueError("a file in it is compressed")
            if any(info.file_size for info in infos if info.filename.endswith(_SOURCE)):
                raise ValueError("it has sources to be compiled")
            if sum(name.endswith(_LIBRARY) for name in names) != 1 or not {ROOT + name for name in _FIXED} <= {*names}:
                raise ValueError("it lacks its library, or a file that says what it is")
            if broken := archive.testzip():
                raise ValueError(f"{broken!r:.80} is damaged")
    except (ValueError, zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError) as e:
        raise ArtifactError(
            f"{source}: no AOTInductor package of llmc: {e}; finish the bundle again on its card's host"
        ) from e


def _known(name: str) -> bool:
    inside = name.removeprefix(ROOT)
    if inside == name:
        return False
    member = inside.removeprefix(FOLDER)
    return inside in _FIXED or (member != inside and _MEMBER.fullmatch(member) is not None)
