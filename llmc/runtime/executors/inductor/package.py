"""A bucket's step compiled by AOTInductor: a code package and the program that it was compiled from.

    file        the container of envelope.py, of form "LLMCAOT1"
    header      {"built_for": {name: value, …}, "sizes": {name: number, …}, "cache": [text, …],
                "device": "cuda" | "cpu"}
    "package"   the .pt2, see below: code; no weights
    "program"   the portable program, a torch.export archive (portable_program.py): data

`built_for` is what the code depends on: `torch`, and on a GPU its `cuda`, `compute_capability`, `gpu` and `driver`.
`sizes` are the step's batch, query, context, and capacity, the tokens of a slot. `cache` describes each array of the
cache (whole_step/step.py) with its kind, dtype and sizes.

Weights are inputs rather than AOTInductor's user-managed constants. Both ways share one copy of the weights among
packages. As inputs, they need no names in the package, none of the model's bytes during compilation, and nothing that
must outlive a call. A call costs 0.3 µs more for each (torch 2.13 on a CPU, 23 weights: 112 and 103 µs); a captured
graph pays nothing. Both have similar sizes: 2.1 MB, of which llmc keeps 1.9. Both update the cache in place.

A .pt2 is a zip with a shared library of code, which is rewritten and checked here without opening it.

What torch writes and reads of it (pytorch/pytorch v2.11.0 and v2.13.0, torch/export/pt2_archive/_package.py and
torch/csrc/inductor/aoti_package/model_package_loader.cpp; both were run here):

    ROOT/archive_format, archive_version, byteorder, .data/version    a few bytes each
    ROOT/data/aotinductor/model/NAME.wrapper.so                       the code, which torch opens as a library
    ROOT/data/aotinductor/model/NAME.…_metadata.json                  words: platform, device, compute capability
    ROOT/data/aotinductor/model/*.cubin                               a CUDA kernel each
    ROOT/data/aotinductor/model/NAME.wrapper.cpp                      sources, and commands with the paths of the host

torch's loader runs a compiler if a package has sources but no library. `torch._inductor.aoti_load_package` also looks
for exported programs, sample inputs and weights, and unpickles them. These are therefore rejected. Sources are emptied
but kept, because torch 2.11 finds the metadata by their name.
"""

from __future__ import annotations

import io
import re
import tempfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.errors import ArtifactError
from llmc.runtime.executors.envelope import ExecutableFile, Form, write_envelope
from llmc.runtime.executors.inductor.toolchain import is_known

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Executable
    from llmc.runtime.executors.whole_step.step import AcceleratorArray, Run

FORM = Form(b"LLMCAOT1", "an AOTInductor executable")
PACKAGE, PROGRAM = "package", "program"
DEVICES = ("cuda", "cpu")
SIZES = ("batch", "query", "context", "capacity")
NAMES = {
    "torch": "torch",
    "cuda": "CUDA",
    "compute_capability": "compute capability",
    "driver": "driver",
    "gpu": "gpu",
}
"""Facts that a package depends on, with their names in errors, most important first."""

CAPACITY = "kv_capacity"
"""Option of a target-compiled bundle: tokens of a cache slot, which packages fix."""

ROOT = "step/"
FOLDER = "data/aotinductor/model/"
NAME = "model"
"""torch's name of a package's only model."""

MAX_BYTES = 4 << 30
_FIXED = ("archive_format", "archive_version", "byteorder", ".data/version")
_DROPPED = (".data/serialization_id",)
_MEMBER = re.compile(r"[A-Za-z0-9_.-]{1,200}\.(?:so|cubin|cpp|json)")
_LIBRARY, _SOURCE = ".so", ".cpp"


@dataclass(frozen=True)
class Package:
    """A parsed and checked file; nothing of it ran."""

    device: str
    built_for: Mapping[str, str]
    sizes: Mapping[str, int]
    cache: tuple[str, ...]
    program: memoryview
    package: memoryview

    @classmethod
    def parse(cls, data: bytes, source: str) -> Package:
        envelope = ExecutableFile.parse(data, source, FORM)
        header = envelope.header
        device, built_for, sizes, cache = (header.get(name) for name in ("device", "built_for", "sizes", "cache"))
        words = isinstance(built_for, dict) and all(isinstance(value, str) for value in built_for.values())
        numbers = isinstance(sizes, dict) and all(type(sizes.get(name)) is int for name in SIZES)
        arrays = isinstance(cache, list) and all(isinstance(array, str) for array in cache)
        if device not in DEVICES or not words or not numbers or not arrays:
            raise ArtifactError(
                f"{source}: damaged, or not made by llmc: its header lacks device, built_for, sizes or cache; finish "
                "the bundle again on its GPU's host"
            )
        sections = envelope.section(PROGRAM), envelope.section(PACKAGE)
        found = cls(device, built_for, sizes, tuple(cache), *sections)  # type: ignore[arg-type]
        check_archive(found.package, source)
        return found

    def to_bytes(self) -> bytes:
        header = {
            "device": self.device, "built_for": dict(self.built_for), "sizes": dict(self.sizes),
            "cache": list(self.cache),
        }  # fmt: skip
        return write_envelope(header, {PACKAGE: bytes(self.package), PROGRAM: bytes(self.program)}, FORM)

    def require_here(self, here: Mapping[str, str], source: str) -> None:
        """Raise ArtifactError naming the first fact (NAMES) of this host that differs from the package's."""
        again = "compile the bundle again here: llmc compile --resume -o BUNDLE"
        for name, called in NAMES.items():
            wanted = self.built_for.get(name)
            if wanted is not None and wanted != here.get(name):
                raise ArtifactError(
                    f"{source}: compiled for {called} {wanted}, this host has {here.get(name) or 'none'}; {again}"
                )
        if not is_known(self.built_for.get("torch", "")):
            raise ArtifactError(
                f"{source}: made by torch {self.built_for.get('torch') or 'of an unknown version'}, whose packages "
                f"llmc does not know; {again}"
            )

    def require_sizes(self, sizes: Mapping[str, int], arrays: Sequence[AcceleratorArray], source: str) -> None:
        """Raise ArtifactError if a step or the cache differs from the compiled one: code would exceed its tensors."""
        pairs = [(f"{name} {self.sizes[name]}", f"{name} {sizes[name]}") for name in SIZES]
        pairs.append((f"a cache of {'; '.join(self.cache)}", f"a cache of {'; '.join(map(str, arrays))}"))
        for compiled, opened in pairs:
            if compiled != opened:
                raise ArtifactError(
                    f"{source}: compiled for {compiled}, opened for {opened}; compile the bundle again: llmc compile "
                    "--resume -o BUNDLE"
                )

    def open(self, source: str, device: Any) -> Run:
        """Load the code as a function like whole_step's `flat_step`, on torch's `device`.

        Call `BundleFiles.require_native` before. Run it from one thread at a time; it takes no locks, as CUDA graph
        capture requires. Raises ArtifactError if torch cannot
        open it. torch removes its unpacked folder when the function is dropped.
        """
        from torch._C import _aoti

        if device.type != self.device:
            raise ArtifactError(
                f"{source}: compiled for {self.device}, and opened on {device.type}; compile the bundle again here: "
                "llmc compile --resume -o BUNDLE"
            )
        index = -1 if device.index is None else device.index
        with tempfile.NamedTemporaryFile(prefix="llmc-", suffix=".pt2", delete=False) as file:
            file.write(self.package)
        try:
            # not aoti_load_package, which looks for programs and weights to unpickle
            loader = _aoti.AOTIModelPackageLoader(file.name, NAME, True, 1, index)
        except RuntimeError as e:
            reason = str(e).strip().partition("\n")[0]
            raise ArtifactError(
                f"{source}: torch cannot open its package ({reason:.300}); compile the bundle again on its GPU's host"
            ) from e
        finally:
            Path(file.name).unlink()

        def step(*tensors: Any) -> Sequence[Any]:
            found: Sequence[Any] = loader.boxed_run(list(tensors))
            return found

        return step


def sizes_of(executable: Executable, capacity: int) -> dict[str, int]:
    """The sizes of an executable's step over a cache with slots of `capacity` tokens."""
    return {
        "batch": executable.batch or 1, "query": executable.query or 1, "context": executable.context or 0,
        "capacity": capacity,
    }  # fmt: skip


def tidied(data: bytes) -> bytes:
    """A package as torch wrote it, with sources emptied and sorted entries. Raises ArtifactError for an invalid one."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(out, "w") as written:
        for info in sorted(archive.infolist(), key=lambda i: i.filename):
            name = info.filename.partition("/")[2]
            if name not in _DROPPED:
                content = b"" if name.endswith(_SOURCE) else archive.read(info)
                written.writestr(zipfile.ZipInfo(ROOT + name), content)
    check_archive(out.getvalue(), "what torch wrote")
    return out.getvalue()


def check_archive(data: bytes | memoryview, source: str) -> None:
    """Raise ArtifactError, naming `source` and the problem, unless `data` is a valid package. Runs nothing of it."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            infos = archive.infolist()
            names = [info.filename for info in infos]
            if sum(info.file_size for info in infos) > MAX_BYTES:
                raise ValueError(f"it unpacks to more than {MAX_BYTES >> 30} GiB")
            if len(set(names)) < len(names):
                raise ValueError("a file occurs twice")
            if odd := [name for name in names if not _is_member(name)]:
                raise ValueError(f"{odd[0]!r:.80} is not allowed in it")
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
            f"{source}: not an AOTInductor package of llmc: {e}; compile the bundle again on its GPU's host"
        ) from e


def _is_member(name: str) -> bool:
    inside = name.removeprefix(ROOT)
    if inside == name:
        return False
    member = inside.removeprefix(FOLDER)
    return inside in _FIXED or (member != inside and _MEMBER.fullmatch(member) is not None)
