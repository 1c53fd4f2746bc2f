"""`llmc deploy opea`: OPEA's launch and query scripts for a bundle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from llmc.deploy.base import DeploymentKind, Options
from llmc.deploy.docker import Compose

if TYPE_CHECKING:
    from llmc.compiler.targets.description import Hosting


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
