"""`--device cpu`: the engine that decodes fastest on this host, ONNX Runtime or OpenVINO, by measurements.

`llmc bench cpu` writes measurements. The user's own come before those kept with the code, which name their machine.
Without a requested quantization, each engine is compared in its default for the model, or, if that was not measured,
all in PLAIN.

Rule: the candidates are the installed engines that offer the requested options and keep the user's limits. The one with
the fastest decode step at the plan's max_num_seqs wins; if traffic lengths are known, the one with the fastest mean
request. Times and memory scale with the model's parameters over the measured model's. Within TIE, ONNX Runtime wins,
because it opens sooner. If no measurement applies, ONNX Runtime wins, and the reason names the difference and the
command that measures.

A measurement file has times and memory of engines on a CPU, and the cases that each record applies to:

    file = {"schema": 2, "measured": [record…]}
    record = {"machine": text, "isa": [feature, …], "threads": number, "model": text, "model_type": text,
              "parameters": number, "versions": {package: version},
              "engines": {engine: {quantisation: one}}}
    one = {"options": {"kernels", "dtype", "specialise"}   as its target configured them
           "decode_ms": {batch: ms of a step}, "prefill_ms": {tokens: ms}, "start_s": seconds from exec to the first
           token, "memory_bytes": proportional set size with 8 sequences}

A record applies to a host that has every feature of `isa`, with the same thread count, versions and options, for models
of the same type with between 1 / SIZES and SIZES times its parameters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.compiler.options import CompileOptions, Option, flag_of
from llmc.compiler.targets import open_target, refuse_foreign
from llmc.compiler.targets.base import Deployment, Resolved, Target
from llmc.compiler.targets.onnxruntime.target import OnnxRuntimeTarget, with_cpus
from llmc.errors import DeviceError, InputError
from llmc.runtime.host import cpu_features
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.compiler.architectures.shared.size import Weights


SCHEMA = 2
KEPT = Path(__file__).with_name("cpu_measurements.json")
OWN = Path("measurements", "cpu.json")
"""The user's own measurements, in the cache folder."""

SIZES = 4.0
"""Largest ratio between a model's parameters and the measured model's; times and memory are scaled in between."""

OPTIONS = ("kernels", "dtype", "specialise")
"""The engine options, besides the quantization, that its figures depend on."""


@dataclass(frozen=True)
class CpuCase:
    """Host, versions and model of a lookup. `options`: each engine's configured OPTIONS, and "quantize" if known."""

    isa: Sequence[str]
    threads: int
    model_type: str
    parameters: int
    versions: Mapping[str, str]
    options: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Measured:
    """One measurement record, in the format of the module docstring."""

    machine: str
    isa: frozenset[str]
    threads: int
    model: str
    model_type: str
    parameters: int
    versions: Mapping[str, str]
    engines: Mapping[str, Mapping[str, Mapping[str, Any]]]

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Measured:
        """Parse a JSON record. Raises KeyError, TypeError, ValueError or AttributeError for anything else."""
        engines = {
            engine: {kind: _checked(one) for kind, one in kinds.items()} for engine, kinds in data["engines"].items()
        }
        versions = {str(name): str(version) for name, version in data["versions"].items()}
        return cls(
            str(data["machine"]), frozenset(data["isa"]), int(data["threads"]), str(data["model"]),
            str(data["model_type"]), int(data["parameters"]), versions, engines,
        )  # fmt: skip

    def unfit(self, case: CpuCase, kinds: Mapping[str, str]) -> str:
        """Explain why the record does not apply to `case` with each engine's quantization; "" where it applies."""
        if missing := sorted(self.isa - set(case.isa)):
            return f"on a CPU with {', '.join(missing)}"
        if self.threads != case.threads:
            return f"with {self.threads} threads, not {case.threads}"
        if self.model_type != case.model_type:
            return f"for {self.model_type}, not {case.model_type}"
        if not 1 / SIZES <= case.parameters / self.parameters <= SIZES:
            return f"for {self.parameters / 1e6:,.4g} M parameters, not {case.parameters / 1e6:,.4g} M"
        for name, wanted in case.versions.items():
            if self.versions.get(name) != wanted:
                return f"with {name} {self.versions.get(name, 'unknown')}, not {wanted}"
        for engine, options in case.options.items():
            one = self.engines.get(engine, {}).get(kinds[engine])
            if one is None:
                return f"without {engine} {kinds[engine]}"
            for name in OPTIONS:
                if name in options and one["options"].get(name) != options[name]:
                    return f"for {engine} with {name} {one['options'].get(name)}, not {options[name]}"
        return ""

    @property
    def key(self) -> tuple[Any, ...]:
        return self.isa, self.threads, self.model_type, self.parameters


def load(path: Path) -> list[Measured]:
    """Read the records of a file. Raises InputError, naming the file, for another format."""
    return [measured for _, measured in _records(path)]


def _records(path: Path) -> list[tuple[Mapping[str, Any], Measured]]:
    try:
        data = json.loads(path.read_bytes())
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']}")
        return [(one, Measured.of(one)) for one in data["measured"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise InputError(f"{path}: not a file of measurements ({e}); make one with `llmc bench cpu`") from e


def added(path: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file's document with `record` added, replacing one of the same key. An invalid file is replaced."""
    new = Measured.of(record)
    try:
        kept = [one for one, old in _records(path) if old.key != new.key]
    except InputError:
        kept = []
    return {"schema": SCHEMA, "measured": [record, *kept]}


def measurements(cache_dir: Path) -> list[Measured]:
    """Return the user's own measurements, then those kept with the code."""
    own = cache_dir / OWN
    return [*(load(own) if own.exists() else []), *load(KEPT)]


def _checked(one: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "options": {name: one["options"][name] for name in OPTIONS},
        "decode_ms": {int(batch): float(ms) for batch, ms in one["decode_ms"].items()},
        "prefill_ms": {int(tokens): float(ms) for tokens, ms in one["prefill_ms"].items()},
        "start_s": float(one["start_s"]),
        "memory_bytes": int(one["memory_bytes"]),
    }


ENGINES = ("onnxruntime", "openvino")
TIE = 0.03
PLAIN = "int8"
"""The quantization that every record has for every engine."""


@dataclass(frozen=True)
class Wanted:
    """The requirements of a bundle. Token counts are the mean request's, 0 where only decode counts."""

    max_num_seqs: int
    quantize: str | None = None
    dtype: str = "auto"
    max_memory: int | None = None
    max_start: float | None = None
    prompt_tokens: float = 0.0
    new_tokens: float = 0.0


@dataclass(frozen=True)
class EngineChoice:
    """The selected engine, and the reason with its numbers."""

    engine: str
    why: str


def choice_for(wanted: Wanted, options: CompileOptions, deployment: Deployment, settings: Settings) -> EngineChoice:
    """Choose an engine for this host by its measurements, among the installed engines."""
    here = installed()
    case = CpuCase(
        cpu_features(), settings.threads, str(deployment.config.get("model_type")), deployment.parameters,
        versions(here), {engine: configured(engine, options, deployment.weights) for engine in here},
    )  # fmt: skip
    return choose(wanted, measurements(settings.cache_dir), case)


def versions(engines: Sequence[str]) -> dict[str, str]:
    """Return the installed version of each engine; "" for one that is not installed as a distribution of its name."""
    found = {}
    for engine in engines:
        try:
            found[engine] = version(engine)
        except PackageNotFoundError:
            found[engine] = ""
    return found


def configured(engine: str, options: CompileOptions, weights: Sequence[Weights] = ()) -> dict[str, Any]:
    """Return an engine's OPTIONS, and quantize, as a compile of such weights sets them; {} if it refuses them."""
    from llmc.buckets.limits import Limits

    try:
        deployment = Deployment(Limits(128), {}, {}, weights)  # engines read only the weights
        found = open_target(engine).resolve(replace(options, device=engine), deployment).options
    except (InputError, DeviceError):
        return {}
    return {name: found.get(name) for name in ("quantize", *OPTIONS)}


def installed() -> tuple[str, ...]:
    """Return the engines whose package is installed."""
    return tuple(engine for engine in ENGINES if find_spec(engine) is not None)


def choose(wanted: Wanted, measured: Sequence[Measured], case: CpuCase) -> EngineChoice:
    """Choose the engine for `wanted` on the host and model of `case`, whose options name the installed engines.

    Raises InputError when no engine keeps the limits, with what each would take.
    """
    here = tuple(case.options)
    if len(here) < 2:
        first = here[0] if here else ENGINES[0]
        other = next(e for e in ENGINES if e != first)
        return EngineChoice(first, f"{other} is not installed")
    if wanted.dtype not in ("auto", "f32"):
        return EngineChoice("openvino", f"only openvino offers dtype {wanted.dtype}")
    record, kinds, unfit = _record(wanted, measured, case)
    if record is None:
        reasons = dict.fromkeys(f"{one.model} was measured {why}" for why, one in unfit) or ["nothing was measured"]
        why = f"no measurement of {_said(kinds)} holds here ({'; '.join(reasons)}): run `llmc bench cpu MODEL`"
        return EngineChoice(ENGINES[0], why)
    found = {engine: record.engines[engine][kinds[engine]] for engine in here}
    scale = case.parameters / record.parameters
    kept = {e: one for e, one in found.items() if _keeps(one, wanted, scale)}
    if not kept:
        takes = (
            f"{e} takes about {one['memory_bytes'] * scale / 1e6:.0f} MB and {one['start_s'] * scale:.2f} s to start"
            for e, one in found.items()
        )
        raise InputError(f"no engine keeps the limits: {'; '.join(takes)}")
    times = {e: _milliseconds(one, wanted) * scale for e, one in kept.items()}
    best = min(times, key=lambda e: (times[e] > min(times.values()) * (1 + TIE), ENGINES.index(e)))
    what = "a mean request" if wanted.prompt_tokens else f"a decode step of {wanted.max_num_seqs}"
    numbers = ", ".join(f"{e}{_kernels(found[e])} {ms:.1f} ms" for e, ms in times.items())
    over = [e for e in found if e not in kept]
    limits = f"; {', '.join(over)} would not keep the limits" if over else ""
    of = "" if scale == 1 else f", scaled from {record.model}"
    return EngineChoice(best, f"{what} in {_said(kinds)} measured: {numbers} ({record.machine}{of}){limits}")


def _record(
    wanted: Wanted, measured: Sequence[Measured], case: CpuCase
) -> tuple[Measured | None, dict[str, str], list[tuple[str, Measured]]]:
    """The first record that applies, each engine's quantization in it, and why each other record does not apply."""
    plain = dict.fromkeys(case.options, wanted.quantize or PLAIN)
    own = {engine: str(options.get("quantize", plain[engine])) for engine, options in case.options.items()}
    for kinds in (own, plain):
        unfit = [(one.unfit(case, kinds), one) for one in measured]
        record = next((one for why, one in unfit if not why), None)
        if record is not None:
            break
    return record, kinds, unfit


def _said(kinds: Mapping[str, str]) -> str:
    if len(set(kinds.values())) == 1:
        return next(iter(kinds.values()))
    return " and ".join(f"{kind} ({engine})" for engine, kind in kinds.items())


def _kernels(one: Mapping[str, Any]) -> str:
    name = one["options"]["kernels"]
    return f" with {name}'s kernels" if name else ""


def _keeps(one: Mapping[str, Any], wanted: Wanted, scale: float) -> bool:
    memory = wanted.max_memory is None or one["memory_bytes"] * scale <= wanted.max_memory
    return memory and (wanted.max_start is None or one["start_s"] * scale <= wanted.max_start)


def _milliseconds(one: Mapping[str, Any], wanted: Wanted) -> float:
    """Milliseconds of a decode step, or of a mean request's prefill and its share of decode steps."""
    import numpy as np

    batches = sorted(one["decode_ms"])
    step: float = float(np.interp(wanted.max_num_seqs, batches, [one["decode_ms"][b] for b in batches]))
    if not wanted.prompt_tokens:
        return step
    tokens, ms = max(one["prefill_ms"].items())
    total: float = wanted.prompt_tokens * ms / tokens + wanted.new_tokens * step / wanted.max_num_seqs
    return total


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
        takers = [engine for engine, target in engines.items() if _configures(target, plain)]
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


def _configures(target: Target, options: CompileOptions) -> bool:
    try:
        target.configure(options)
    except InputError:
        return False
    return True
