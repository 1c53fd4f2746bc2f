"""`llmc deploy docker` and `compose`: images, and a Docker Compose service for the serving image."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from llmc.deploy.base import DeploymentKind, Options, base_image
from llmc.errors import InputError


class Docker(DeploymentKind):
    """A Dockerfile with a stage that compiles, and a slim one that serves without torch and without root."""

    name = "docker"
    takes = ("bundle", "base_image", "port")
    templates: ClassVar[Mapping[str, str]] = {
        "Dockerfile": "docker/Dockerfile", ".dockerignore": "docker/dockerignore",
    }  # fmt: skip

    def files(self, options: Options) -> Mapping[str, str]:
        """Render the templates, and add the plan for the compile stage and the package constraints."""
        facts = options.facts
        return {**super().files(options), "plan.json": facts.plan_json, "constraints.txt": facts.constraints}

    def values(self, options: Options) -> dict[str, Any]:
        """The base image of all stages."""
        return {**super().values(options), "base_image": base_image(options)}


class Compose(DeploymentKind):
    """A Docker Compose service for the image of `Docker`."""

    name = "compose"
    takes = ("bundle", "image", "port", "cpus")
    templates: ClassVar[Mapping[str, str]] = {"compose.yaml": "compose/compose.yaml"}

    def values(self, options: Options) -> dict[str, Any]:
        """The bundle folder, image and devices. Raises InputError for a bundle that is not a folder."""
        folder = Path(options.bundle_path).absolute()
        if not folder.is_dir():
            raise InputError(f"{options.bundle_path} is not a folder that a container can mount; pull it with -o")
        found = super().values(options)
        return {
            **found, "folder": str(folder), "image": options.image or f"llmc-{options.label}:latest",
            "devices": [f"{one}:{one}" for one in found["hosting"].devices],
        }  # fmt: skip
