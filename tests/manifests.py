"""A bundle's manifest, changed together with its checksum, as someone who knows of both would."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmc.artifacts.bundle.manifest import CHECKSUM_NAME, FILE_NAME, checksum_line
from llmc.artifacts.digest import digest_bytes


def write_manifest(bundle: Path, content: bytes) -> None:
    (bundle / FILE_NAME).write_bytes(content)
    (bundle / CHECKSUM_NAME).write_bytes(checksum_line(digest_bytes(content)))


def edit_manifest(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((bundle / FILE_NAME).read_bytes())
    change(document)
    write_manifest(bundle, json.dumps(document).encode())
