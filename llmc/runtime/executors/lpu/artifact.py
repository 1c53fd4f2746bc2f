"""The output of HyperDex's compiler in a bundle: a JSON file, and each of its files as a file of the bundle.

executable = { "format": 1, "devices", "max_length",            LPUs, and tokens of a prompt with its continuation
               "low_memory_usage", "fast_compile",              as AutoCompiler.compile takes them
               "hyperdex": version,
               "files": {path in the model's folder: name in the bundle} }
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from llmc.errors import ArtifactError
from llmc.strict_json import loads_object

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle

MODEL = Path("llmc/model")
"""A model's folder ends like a hub name (Hyper-Accel/docs, docs/model_compile.md at fab45db). It is always this name,
so that the compiler's output does not depend on the checkpoint's.
"""

FORMAT = 1
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}")
_KINDS: Mapping[str, type] = {
    "devices": int, "max_length": int, "low_memory_usage": bool, "fast_compile": bool, "hyperdex": str, "files": dict,
}  # fmt: skip


@dataclass(frozen=True)
class Artifact:
    """A parsed executable file; the module docstring has its grammar."""

    devices: int
    max_length: int
    low_memory_usage: bool
    fast_compile: bool
    hyperdex: str
    files: Mapping[str, str]

    def to_bytes(self) -> bytes:
        return json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True).encode()

    @classmethod
    def of(cls, bundle: Bundle) -> Artifact:
        """The bundle's artifact. Raises ArtifactError if it is missing or of another format."""
        return cls.parse(bundle.files.read(bundle.executable("any", None, None, None).blob), bundle)

    @classmethod
    def parse(cls, data: bytes, bundle: Bundle) -> Artifact:
        """Parse the artifact `data` of `bundle` and check that its paths stay within a folder. Raises ArtifactError."""

        def fail(problem: str) -> NoReturn:
            raise ArtifactError(f"{bundle.path}: its LPU artifact {problem}; compile again: {bundle.recompile_hint}")

        try:
            found: dict[str, Any] = loads_object(data)
        except ValueError as e:
            fail(f"is not JSON ({e})")
        if found.pop("format", None) != FORMAT:
            fail(f"is not of format {FORMAT}, which this llmc reads")
        if found.keys() != _KINDS.keys() or any(type(found[name]) is not kind for name, kind in _KINDS.items()):
            fail("lacks members of its format, or has others")
        if not is_power_of_two(found["devices"]) or found["max_length"] < 2:
            fail(f"says {found['devices']} devices and max_length {found['max_length']}")
        for path, name in found["files"].items():
            if not all(_PART.fullmatch(part) for part in path.split("/")) or not isinstance(name, str):
                fail(f"has a file at {path!r:.100}, which is not a relative path within a folder")
        return cls(**found)

    def lay_out(self, bundle: Bundle, folder: Path) -> None:
        """Link its verified files into `folder` under the paths that HyperDex expects. Raises ArtifactError."""
        for path, name in self.files.items():
            if name not in bundle.manifest.files:
                raise ArtifactError(
                    f"{bundle.path}: the file {name} of its LPU artifact is missing; compile again: "
                    f"{bundle.recompile_hint}"
                )
            index = folder / path
            index.parent.mkdir(parents=True, exist_ok=True)
            index.symlink_to(bundle.files.path(name).absolute())


def is_power_of_two(number: int) -> bool:
    """Whether HyperDex's compiler supports this number of LPUs (lpu_model_runner.py at a10068c)."""
    return number > 0 and number & (number - 1) == 0
