"""A folder with two bundles of one checkpoint, for disaggregated prefill and decode on two devices.

disaggregated.json = {"schema": 1, "prefill": name, "decode": name}        names of folders next to it
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
FILE_NAME = "disaggregated.json"
MAX_BYTES = 1 << 16
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


class Halves(NamedTuple):
    """The prefill and decode bundle folders."""

    prefill: Path
    decode: Path

    @classmethod
    def of(cls, folder: Path) -> Halves:
        """Return the two paths for a new pair in `folder`."""
        return cls(folder / "prefill", folder / "decode")

    @classmethod
    def read(cls, folder: Path) -> Halves | None:
        """Read disaggregated.json in `folder`; None if absent. Raises ArtifactError for an invalid file."""
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
                f"{path}: not valid for this llmc ({e}); compile it again: llmc compile MODEL "
                f"--prefill-device X --decode-device Y -o {folder}"
            ) from e
        return cls(folder / names[0], folder / names[1])

    def write(self) -> None:
        """Write disaggregated.json next to the two bundles. Raises CapacityError or UnwritableError."""
        found = {"schema": SCHEMA, "prefill": self.prefill.name, "decode": self.decode.name}
        folder, text = self.decode.parent, json.dumps(found).encode() + b"\n"
        with writing(folder / FILE_NAME, len(text), "choose another folder"):
            write_atomic(folder / FILE_NAME, text, folder)
