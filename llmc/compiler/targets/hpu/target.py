"""Intel Gaudi, first stage: portable programs (programs.py) that any host can compile, verify and run on its CPU.

There is no supported way to compile for Gaudi without the device. `remaining` lists the on-target work of on_target.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from llmc.compiler.targets.description import Hosting, contract_tested
from llmc.compiler.targets.programs import PROGRAMS, ProgramCosts, ProgramTarget
from llmc.runtime.accelerators import GAUDI

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmc.buckets.bucket import Bucket
    from llmc.compiler.architectures.shared.size import ModelSize
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.targets.costs import Costs
    from llmc.compiler.targets.on_target import OnTargetCompiler

GAUDI_BYTES = 128 * 10**9
"""Memory of a Gaudi 3, which has the most (Gaudi 2: 96 GB)."""


class HpuCosts(ProgramCosts):
    """Costs of captured HPU graphs."""

    device_seconds: ClassVar[float] = 29 * 60 / 126
    device_source: ClassVar[str] = "126 buckets in 29 minutes on a Gaudi host (vllm-gaudi#1160)"
    graph_bytes_source: ClassVar[str] = (
        "a formula that fits the Gaudi guide's warm-up of an 8B model: 14.03 GiB for 9,984 prompt tokens, 161.9 MiB "
        "for 112 decode tokens"
    )

    def memory(self, options: CompileOptions) -> tuple[int, str] | None:
        return GAUDI_BYTES, "of a Gaudi 3"

    def graph_bytes(self, model: ModelSize, bucket: Bucket, options: CompileOptions) -> int:
        """A captured HPU graph keeps every layer's values separately, in bf16, in both phases."""
        return 2 * model.activations * bucket.tokens


class HpuTarget(ProgramTarget):
    """`--device hpu`."""

    description = replace(
        PROGRAMS,
        name="hpu",
        executor="hpu",
        also_called=("gaudi", "gaudi2", "gaudi3", "habana"),
        why_static="HPU graphs are captured and replayed at fixed shapes",
        guide="docs/accelerators.md",
        accelerators=(GAUDI,),
        hardware=contract_tested("the programs were run and verified on CPU"),
    )

    @property
    def costs(self) -> Costs:
        return HpuCosts()

    def remaining(self) -> str:
        return (
            "on a Gaudi host (habana_frameworks.torch): move each program to hpu, compile its recipes with the Habana "
            "graph compiler into the recipe cache (PT_HPU_RECIPE_CACHE_CONFIG), capture an HPU graph for each bucket, "
            "and warm up"
        )

    def on_target(self) -> OnTargetCompiler:
        """The recipe finisher, imported here to keep it out of portable programs' keys."""
        from llmc.compiler.targets.hpu.on_target import RecipeCompiler

        return RecipeCompiler()

    def hosting(self, recorded: Mapping[str, Any]) -> Hosting:
        """One device of Intel's device plug-in, and eager mode, as in the job that compiles a bundle."""
        return Hosting(
            own_image="Intel's Gaudi software (habana_frameworks.torch)",
            resources={"habana.ai/gaudi": 1},
            environment={"PT_HPU_LAZY_MODE": "0"},
            runtime="habana",
            host_memory=False,
        )
