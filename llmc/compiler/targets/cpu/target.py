"""`--device cpu`: the engine that decodes fastest on this host, ONNX Runtime or OpenVINO (auto_engine.py)."""

from __future__ import annotations

from dataclasses import replace

from llmc.compiler.options import CompileOptions, Option, flag_of
from llmc.compiler.targets.base import Deployment, Resolved, Target
from llmc.compiler.targets.onnxruntime.for_cpus import with_cpus
from llmc.compiler.targets.onnxruntime.target import OnnxRuntimeTarget
from llmc.errors import InputError

MAX_MEMORY: Option[int | None] = Option(
    "max_memory", int, None, "Memory limit of the engine that cpu selects.", metavar="SIZE", is_size=True
)
MAX_START: Option[float | None] = Option(
    "max_start", float, None, "Limit of the time to its first token.", metavar="SECONDS"
)


class CpuTarget(OnnxRuntimeTarget):
    """Delegates to another target; without a choice, it behaves as ONNX Runtime's."""

    description = replace(
        OnnxRuntimeTarget.description,
        name="cpu",
        also_called=("x86", "x86_64"),
        options=(*OnnxRuntimeTarget.description.options, MAX_MEMORY, MAX_START),
    )

    def resolve(self, options: CompileOptions, deployment: Deployment) -> Resolved:
        """Select the only engine that takes a given option, or the one that measurements favour."""
        from llmc.compiler.targets import open_target
        from llmc.compiler.targets.cpu.auto_engine import ENGINES, Wanted, choice_for
        from llmc.compiler.targets.declared import refuse_foreign

        options, own = with_cpus(options, self._cpus), self.description.options
        engines = {engine: open_target(engine, self.settings) for engine in ENGINES}
        names = {engine: {option.name for option in target.description.options} for engine, target in engines.items()}
        known = {option.name for option in own}.union(*names.values())
        for name, value in options.own.items():
            if name not in known:
                refuse_foreign(name, value, self.description.name)
        memory, start = MAX_MEMORY.of(options), MAX_START.of(options)
        unset = {option.name: None for option in own if option.of(options) == option.default}
        plain = options.changed(**unset | {MAX_MEMORY.name: None, MAX_START.name: None})
        takers = [engine for engine, target in engines.items() if _takes(target, plain)]
        if plain.own and len(takers) < len(engines):
            flags, know_all = ", ".join(map(flag_of, plain.own)), [e for e in ENGINES if plain.own.keys() <= names[e]]
            engine = next(iter(takers or know_all), ENGINES[0])  # an engine that takes none of these reports why
            return replace(engines[engine].resolve(plain, deployment), why=f"only {engine} takes {flags}")
        wanted = Wanted(
            deployment.limits.max_num_seqs, options.quantize, options.dtype, memory, start,
            float(deployment.facts.get("mean_prompt_tokens", 0)), float(deployment.facts.get("mean_new_tokens", 0)),
        )  # fmt: skip
        choice = choice_for(wanted, plain, deployment, self.settings)
        return replace(engines[choice.engine].resolve(plain, deployment), why=choice.why)


def _takes(target: Target, options: CompileOptions) -> bool:
    try:
        target.configure(options)
    except InputError:
        return False
    return True
