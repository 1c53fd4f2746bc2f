"""A folder with two bundles of one checkpoint: one for the device that computes prompts, one for that which decodes.

hybrid.json = {"schema": 1, "prefill": name, "decode": name}        names of folders beside it
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from llmc.artifacts.atomic_write import write_atomic, writing
from llmc.artifacts.digest import open_regular
from llmc.errors import ArtifactError
from llmc.strict_json import loads_object

SCHEMA = 1
FILE_NAME = "hybrid.json"
MAX_BYTES = 1 << 16
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


class Halves(NamedTuple):
    """The two bundle folders."""

    prefill: Path
    decode: Path

    @classmethod
    def of(cls, folder: Path) -> Halves:
        """Those of a new hybrid in `folder`."""
        return cls(folder / "prefill", folder / "decode")

    @classmethod
    def read(cls, folder: Path) -> Halves | None:
        """Those of the hybrid `folder`; None where it is none. Raises ArtifactError for a file that says nothing."""
        path = folder / FILE_NAME
        try:
            with open_regular(path) as file:
                data = file.read(MAX_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as e:
            raise ArtifactError(f"{path}: cannot be read: {e.strerror}") from e
        try:
            found = loads_object(data)
            names = [found[half] for half in ("prefill", "decode")]
            if found["schema"] != SCHEMA or not all(isinstance(name, str) and _NAME.fullmatch(name) for name in names):
                raise ValueError(f"schema {found['schema']!r:.20}, halves {names!r:.100}")
        except (ValueError, KeyError, TypeError) as e:
            raise ArtifactError(
                f"{path}: not a hybrid of this llmc ({e}); compile it again: llmc compile MODEL --prefill-device X "
                f"--decode-device Y -o {folder}"
            ) from e
        return cls(folder / names[0], folder / names[1])

    def write(self) -> None:
        """Make the folder of both a hybrid."""
        found = {"schema": SCHEMA, "prefill": self.prefill.name, "decode": self.decode.name}
        folder, text = self.decode.parent, json.dumps(found).encode() + b"\n"
        with writing(folder / FILE_NAME, len(text), "choose another folder"):
            write_atomic(folder / FILE_NAME, text, folder)
