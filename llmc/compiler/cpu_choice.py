"""Which engine `--device cpu` compiles for, by what was measured: ONNX Runtime or OpenVINO.

    measurements = {"schema": 1, "machine": text, "isa": [feature, …], "model": text, "parameters": number,
                    "engines": {engine: {quantisation: one}}}
    one = {"decode_ms": {batch: ms of a step}, "prefill_ms": {tokens: ms}, "start_s": seconds from exec to the first
           token, "memory_bytes": proportional set size with 8 sequences}

The file that is kept with the code (cpu_measurements.json) was made by `llmc bench cpu` on the machine that it names;
the user's own, made by the same command, wins where there is one. Measurements count for hosts that have every feature
of `isa`.

Rule: of the engines that are installed, offer what was asked for and keep the user's limits, the one whose decode step
at the plan's max_num_seqs takes less time; with the lengths of traffic, the one whose mean request does. Times and
memory are scaled by the model's parameters over the measured model's. Within TIE, ONNX Runtime, which opens sooner.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc.compiler.options import CPU_OPTIONS, ONNXRUNTIME_OPTIONS, OPENVINO_OPTIONS, CompileOptions
from llmc.compiler.targets import open_target
from llmc.errors import InputError
from llmc.runtime.host import cpu_features
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.buckets.plan import Plan
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.targets.base import Target

CPU = "cpu"

SCHEMA = 1
ENGINES = ("onnxruntime", "openvino")
TIE = 0.03
KEPT = Path(__file__).with_name("cpu_measurements.json")
OWN = Path("measurements", "cpu.json")
"""The user's own, in the cache folder."""


@dataclass(frozen=True)
class Wanted:
    """What a bundle is for. `prompt_tokens` and `new_tokens` are the mean request's, 0 where only decode counts."""

    max_num_seqs: int
    quantize: str | None = None
    dtype: str = "auto"
    max_memory: int | None = None
    max_start: float | None = None
    prompt_tokens: float = 0.0
    new_tokens: float = 0.0


@dataclass(frozen=True)
class Choice:
    """The engine, and why in a sentence with the numbers."""

    engine: str
    why: str


@dataclass(frozen=True)
class Measured:
    """Measurements of one file; see the module's docstring."""

    source: str
    machine: str
    isa: frozenset[str]
    parameters: int
    engines: Mapping[str, Mapping[str, Mapping[str, Any]]]

    @classmethod
    def load(cls, path: Path) -> Measured:
        """Read a file. Raises InputError, naming it, for what is not one."""
        try:
            data = json.loads(path.read_bytes())
            if data["schema"] != SCHEMA:
                raise ValueError(f"schema {data['schema']}")
            engines = {
                engine: {kind: _checked(one) for kind, one in kinds.items()}
                for engine, kinds in data["engines"].items()
            }
            return cls(str(path), str(data["machine"]), frozenset(data["isa"]), int(data["parameters"]), engines)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise InputError(f"{path}: not a file of measurements ({e}); make one with `llmc bench cpu`") from e


def _checked(one: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "decode_ms": {int(batch): float(ms) for batch, ms in one["decode_ms"].items()},
        "prefill_ms": {int(tokens): float(ms) for tokens, ms in one["prefill_ms"].items()},
        "start_s": float(one["start_s"]),
        "memory_bytes": int(one["memory_bytes"]),
    }


def measurements(cache_dir: Path) -> Measured:
    """The user's own where there are some, and those kept with the code."""
    own = cache_dir / OWN
    return Measured.load(own if own.exists() else KEPT)


def engine_for(
    options: CompileOptions, plan: Plan, checkpoint: Checkpoint
) -> tuple[Target, CompileOptions, str]:  # fmt: skip
    """The target that `options.device` stands for, the options without the limits that chose it, and why it.

    Raises InputError for limits with another device than cpu, or that no engine keeps.
    """
    limits = [name for name in CPU_OPTIONS if getattr(options, name) is not None]
    if options.device != CPU:
        if limits:
            flag = limits[0].replace("_", "-")
            raise InputError(f"--{flag} chooses what --device cpu stands for; leave it out for {options.device}")
        return open_target(options.device), options, ""
    plain = replace(options, max_memory=None, max_start=None)
    for engine, names in (("onnxruntime", ONNXRUNTIME_OPTIONS), ("openvino", OPENVINO_OPTIONS)):
        if given := [name for name in names if name in options.extensions]:
            return open_target(engine), plain, f"only {engine} takes --{given[0].replace('_', '-')}"
    facts = plan.provenance.facts
    wanted = Wanted(
        plan.limits.max_num_seqs, options.quantize, options.dtype, options.max_memory, options.max_start,
        float(facts.get("mean_prompt_tokens", 0)), float(facts.get("mean_new_tokens", 0)),
    )  # fmt: skip
    parameters = sum(prod(checkpoint.shape(name)) for name in checkpoint.tensor_names())
    measured = measurements(Settings.from_environment().cache_dir)
    choice = choose(wanted, measured, cpu_features(), installed(), parameters)
    return open_target(choice.engine), plain, choice.why


def installed() -> tuple[str, ...]:
    """The engines whose package is here."""
    return tuple(engine for engine in ENGINES if find_spec(engine) is not None)


def choose(wanted: Wanted, measured: Measured, isa: Sequence[str], here: Sequence[str], parameters: int) -> Choice:
    """The engine for `wanted` on a host with features `isa` and engines `here`, for a model of so many parameters.

    Raises InputError when no engine keeps the limits, saying what each would take.
    """
    first = here[0] if here else ENGINES[0]
    if len(here) == 1:
        other = next(e for e in ENGINES if e != first)
        return Choice(first, f"{other} is not installed")
    if wanted.dtype not in ("auto", "f32"):
        return Choice("openvino", f"only openvino offers dtype {wanted.dtype}")
    missing = sorted(measured.isa - set(isa))
    if missing:
        return Choice(ENGINES[0], f"nothing was measured for a CPU without {', '.join(missing)}: `llmc bench cpu` does")
    kind = wanted.quantize or "int8"
    found = {e: measured.engines[e][kind] for e in here if kind in measured.engines.get(e, {})}
    if len(found) < 2:
        only = next(iter(found), ENGINES[0])
        return Choice(only, f"{kind} was measured for {' and '.join(found) or 'no engine'} only")
    scale = parameters / measured.parameters
    kept = {e: one for e, one in found.items() if _keeps(one, wanted, scale)}
    if not kept:
        raise InputError(f"no engine keeps the limits: {'; '.join(_takes(e, one, scale) for e, one in found.items())}")
    times = {e: _milliseconds(one, wanted) * scale for e, one in kept.items()}
    best = min(times, key=lambda e: (times[e] > min(times.values()) * (1 + TIE), ENGINES.index(e)))
    what = "a mean request" if wanted.prompt_tokens else f"a decode step of {wanted.max_num_seqs}"
    numbers = ", ".join(f"{e} {ms:.1f} ms" for e, ms in times.items())
    over = [e for e in found if e not in kept]
    limits = f"; {', '.join(over)} would not keep the limits" if over else ""
    return Choice(best, f"{what} measured: {numbers} ({measured.machine}){limits}")


def _keeps(one: Mapping[str, Any], wanted: Wanted, scale: float) -> bool:
    memory = wanted.max_memory is None or one["memory_bytes"] * scale <= wanted.max_memory
    return memory and (wanted.max_start is None or one["start_s"] * scale <= wanted.max_start)


def _takes(engine: str, one: Mapping[str, Any], scale: float) -> str:
    memory, start = one["memory_bytes"] * scale / 1e6, one["start_s"] * scale
    return f"{engine} takes about {memory:.0f} MB and {start:.2f} s to start"


def _milliseconds(one: Mapping[str, Any], wanted: Wanted) -> float:
    """Of a decode step, or of a mean request's prompt and its share of decode steps."""
    batches = sorted(one["decode_ms"])
    step: float = float(np.interp(wanted.max_num_seqs, batches, [one["decode_ms"][b] for b in batches]))
    if not wanted.prompt_tokens:
        return step
    tokens, ms = max(one["prefill_ms"].items())
    total: float = wanted.prompt_tokens * ms / tokens + wanted.new_tokens * step / wanted.max_num_seqs
    return total
