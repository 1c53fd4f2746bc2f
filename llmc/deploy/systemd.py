"""`llmc deploy systemd`: a systemd unit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from llmc.deploy.base import DeploymentKind, Options


class Systemd(DeploymentKind):
    """A unit for a host, sandboxed except for the bundle, its cache and its port."""

    name = "systemd"
    takes = ("bundle", "port", "cpus", "program")
    templates: ClassVar[Mapping[str, str]] = {"llmc-{name}.service": "systemd/unit"}

    def values(self, options: Options) -> dict[str, Any]:
        """The bundle's absolute path, and the Python next to the program."""
        folder = Path(options.bundle_path).is_dir()
        location = str(Path(options.bundle_path).absolute()) if folder else options.bundle_path
        python = str(Path(options.program).parent / "python3")
        return {**super().values(options), "bundle": location, "folder": folder, "python": python}
