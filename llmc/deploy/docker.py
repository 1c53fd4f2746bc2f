"""`llmc deploy docker` and `compose`: images, and a service over the one that serves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from llmc.deploy.base import DeploymentKind, Options, base_image
from llmc.errors import InputError


class Docker(DeploymentKind):
    """A Dockerfile that compiles, and a slim image that serves, without torch and without root."""

    name = "docker"
    takes = ("bundle", "base_image", "port")
    templates: ClassVar[Mapping[str, str]] = {
        "Dockerfile": "docker/Dockerfile", ".dockerignore": "docker/dockerignore",
    }  # fmt: skip

    def files(self, options: Options) -> Mapping[str, str]:
        """And the bundle's plan, for the stage that compiles, and the packages of both."""
        facts = options.facts
        return {**super().files(options), "plan.json": facts.plan_json, "constraints.txt": facts.constraints}

    def values(self, options: Options) -> dict[str, Any]:
        """The image that all stages are built on."""
        return {**super().values(options), "base_image": base_image(options)}


class Compose(DeploymentKind):
    """A service of Docker Compose over the image of `Docker`."""

    name = "compose"
    takes = ("bundle", "image", "port", "cpus")
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
