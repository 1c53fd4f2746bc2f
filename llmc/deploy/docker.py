"""`llmc deploy docker`, `compose`, `opea` and `systemd`: images, a Compose service, OPEA's scripts, and a unit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from llmc.deploy.base import DeploymentKind, Options, base_image
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.compiler.targets.description import Hosting


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


class Opea(DeploymentKind):
    """The scripts of OPEA's vLLM guide for a bundle: a launch script with seven parameters, and two forms of a request.

    A compiled bundle is fixed, so the launch script accepts only the bundle's own block_size, max_num_seqs and
    max_seq_len_to_capture; for other values it says how to compile.
    """

    name = "opea"
    takes = ("bundle", "image", "cpus")
    templates: ClassVar[Mapping[str, str]] = {
        "launch_vllm_service.sh": "opea/launch", "query.sh": "opea/query",
    }  # fmt: skip

    def values(self, options: Options) -> dict[str, Any]:
        """The parameters that the bundle was compiled with, and the container's flags."""
        found, limits = Compose().values(options), options.facts.plan.limits
        hosting, device = found["hosting"], options.facts.manifest.device.partition(":")[0]
        compiled = {
            "model_name": options.facts.model, "hw_mode": device if hosting.resources else "cpu", "parallel_number": 1,
            "block_size": limits.block_size, "max_num_seqs": limits.max_num_seqs,
            "max_seq_len_to_capture": limits.max_model_len,
        }  # fmt: skip
        count = hosting.reservation.get("count")
        given = {"--runtime": [hosting.runtime], "--gpus": [count], "--device": hosting.devices}
        flags = [word for flag, values in given.items() for value in values if value for word in (flag, value)]
        return {**found, "compiled": compiled, "flags": ["--env", "LLMC_API_KEY", *flags, *_variables(hosting)]}


def _variables(hosting: Hosting) -> list[str]:
    return [word for name, value in hosting.environment.items() for word in ("--env", f"{name}={value}")]


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
