"""`llmc deploy compose`: a service of Docker Compose over the image of `llmc deploy docker`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from llmc.deploy.base import Kind, Options
from llmc.errors import InputError


class Compose(Kind):
    """See the module's docstring."""

    name: ClassVar[str] = "compose"
    takes: ClassVar[tuple[str, ...]] = ("bundle", "image", "port", "cpus")
    templates: ClassVar[Mapping[str, str]] = {"compose.yaml": "compose/compose.yaml"}

    def values(self, options: Options) -> dict[str, Any]:
        """The bundle's folder, the image, and the device's part. Raises InputError for a bundle that is no folder."""
        folder = Path(options.bundle_path).absolute()
        if not folder.is_dir():
            raise InputError(f"{options.bundle_path} is not a folder, which a container could mount; pull it with -o")
        found = super().values(options)
        return {
            **found, "folder": str(folder), "image": options.image or f"llmc-{options.label}:latest",
            "devices": [f"{one}:{one}" for one in found["hosting"].devices],
        }  # fmt: skip
