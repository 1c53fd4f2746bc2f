"""`llmc deploy docker`: a Dockerfile that compiles, and a slim image that serves, without torch and without root."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from llmc.deploy.base import Kind, Options, base_image


class Docker(Kind):
    """See the module's docstring."""

    name: ClassVar[str] = "docker"
    takes: ClassVar[tuple[str, ...]] = ("bundle", "base_image", "port")
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
