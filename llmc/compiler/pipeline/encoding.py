"""Compile a checkpoint that embeds or scores: plan, trace once, compile, verify, publish."""

from __future__ import annotations

import io
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.artifacts.bundle.manifest import Manifest
from llmc.artifacts.bundle.writer import check_replaceable
from llmc.artifacts.key import Key
from llmc.buckets.encoding import EncodePlan, encode_plan, traffic_plan
from llmc.buckets.traffic.reader import Trace
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.checkpoint.sentence_files import Read, labels_of, read_description, task_of
from llmc.compiler.estimates.durations import typical
from llmc.compiler.model_size import weights_of
from llmc.compiler.options import LOCAL, CompileOptions
from llmc.compiler.pipeline.compile import CompileResult, LookupStages, NotBuiltError, Reporter, ignore, publish
from llmc.compiler.pipeline.encoding_verification import verification_of
from llmc.compiler.pipeline.provenance import provenance
from llmc.compiler.stages import StageReport, Stages
from llmc.compiler.targets import open_target
from llmc.compiler.targets.encoder import CompiledEncoder, EncoderCase, EncoderTarget, open_encoder_target
from llmc.compiler.text import text_files
from llmc.errors import InputError, UnknownNameError
from llmc.runtime.pooling.modules import POOLING, WEIGHTS, Task
from llmc.version import __version__

if TYPE_CHECKING:
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.store import Store
    from llmc.compiler.checkpoint.base import Checkpoint

GENERATE = "generate"
TASKS = (GENERATE, "embed", "score")


def settled_task(checkpoint: Checkpoint, requested: str | None) -> Task | None:
    """The requested task, or the checkpoint's own; None to generate. Raises UnknownNameError."""
    if requested is not None and requested not in TASKS:
        raise UnknownNameError("task", requested, TASKS)
    if requested is None:
        return task_of(checkpoint)
    return None if requested == GENERATE else requested  # type: ignore[return-value] # one of TASKS


def plan_encoder(checkpoint: Checkpoint, task: Task, **given: Any) -> EncodePlan:
    """Plan for a checkpoint; the limits in `given` are max_model_len, max_num_seqs and max_num_batched_tokens.

    `traffic`, a file or an open `Trace`, has recorded texts; at most `max_graphs` bucket lengths are chosen for the
    least padding. Raises InputError for a length beyond the model's positions.
    """
    requested = given.get("max_model_len")
    longest = read_description(checkpoint, task).description.max_length
    if requested is not None and requested > longest:
        raise InputError(
            f"--max-model-len {requested} is above the {longest} tokens of {checkpoint.requested}; lower it"
        )
    chosen = {k: v for k, v in given.items() if v is not None and k not in ("max_model_len", "traffic")}
    traffic = given.get("traffic")
    if traffic is None:
        return encode_plan(task, requested or longest, **chosen)
    trace = traffic if isinstance(traffic, Trace) else Trace(os.fspath(traffic), generates=False)
    texts = Counter(request.prompt for request in trace)
    return traffic_plan(
        task, texts, max_length=requested or longest, facts={"traffic_sha256": trace.digest()}, **chosen
    )


EXECUTABLE = "executable"
"""Stage name of one executable."""
LIMITS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")
OF_TRAFFIC = ("traffic", "max_graphs")
"""Planning arguments about recorded texts."""


def encoder_plan_of(checkpoint: Checkpoint, task: Task, plan: object, given: Mapping[str, Any]) -> EncodePlan:
    """`plan`, or a new one with the arguments `given` (`plan_encoder`).

    Raises InputError for a plan of another task, and for further arguments.
    """
    requested = {name: value for name, value in given.items() if value is not None}
    if plan is not None:
        if not isinstance(plan, EncodePlan) or plan.task != task:
            raise InputError(f"the plan is not for the task {task}: create it with llmc plan MODEL --task {task}")
        return plan
    known = {*LIMITS, *(OF_TRAFFIC if "traffic" in requested else ())}
    if other := sorted(requested.keys() - known):
        raise InputError(
            f"{', '.join(other)}: a model to {task} is planned by {', '.join(LIMITS)}, and by traffic with max_graphs; "
            "leave out the rest"
        )
    return plan_encoder(checkpoint, task, **requested)


def compile_encoder(
    model: str | Checkpoint, destination: Path, plan: EncodePlan, options: CompileOptions, store: Store,
    report: Reporter,
) -> CompileResult:  # fmt: skip
    """Compile `model` for `options.device` into the bundle folder `destination`.

    Raises the errors of `compile_bundle`; then `destination` stays unchanged.
    """
    start = time.perf_counter()
    if options.executor != LOCAL:
        raise InputError(
            f"--executor {options.executor} cannot compile models to {plan.task}, which are compiled on this host; "
            "leave it out"
        )
    checkpoint, task = open_checkpoint(model), plan.task
    assert task in ("embed", "score")
    target, why = open_encoder_target(options.device)
    options = target.configure(options)
    target.toolchain()
    store.require_usable(Key("executable", {"target": target.name, "state": target.state}))
    check_replaceable(Path(os.path.realpath(destination)))
    seconds: dict[str, float] = {}
    stored: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    telling = threading.Lock()

    def on_stage(event: StageReport) -> None:
        with telling:  # several threads may build executables
            total = len(plan.buckets) if event.name == EXECUTABLE and options.specialise else 1
            if event.seconds is not None:
                seconds[event.name] = round(seconds.get(event.name, 0) + event.seconds, 3)
                stored[event.name] += event.cached
                ended[event.name] += 1
            report(replace(event, index=ended[event.name], total=total))

    stages = Stages(store, checkpoint, plan, on_stage)
    read = read_description(checkpoint, task, plan.limits.max_model_len)  # type: ignore[arg-type]
    case = EncoderCase.of(checkpoint, task)  # type: ignore[arg-type]
    created = target.make(stages, plan, case, options)
    analysis = target.analyse(stages, created, options)
    choice = "; ".join(filter(None, (target.choice(options), why)))
    manifest, sources = _assemble(stages, target, created, read, plan, options, analysis, choice)
    verification = verification_of(stages, target, manifest, sources, plan, case, options, report)
    final = manifest.changed(verification=verification)
    publish(stages, destination, final, sources)
    states = [e.state for e in final.executables]
    reused = sum(stored[kind] for kind in {entry.key.kind for _, entry in created.executables})
    return CompileResult(
        bundle=str(destination), device=options.device, built=len(states) - reused, reused=reused,
        portable=states.count("portable"), native=states.count("native"),
        seconds=round(time.perf_counter() - start, 3), bytes=final.size,
        weights_bytes=final.blobs[final.files["weights"]] if "weights" in final.files else 0,
        specialised=bool(options.specialise), sample_top_k=0, choice=choice, remaining="", analysis=analysis,
        described=open_target(options.device).describe(analysis) if analysis else [],
        stages=seconds, verification=dict(final.verification),
    )  # fmt: skip


def _assemble(
    stages: Stages, target: EncoderTarget, created: CompiledEncoder, read: Read, plan: EncodePlan,
    options: CompileOptions,    analysis: Mapping[str, Any], choice: str,
) -> tuple[Manifest, dict[str, Path]]:  # fmt: skip
    store, checkpoint, config = stages.store, stages.checkpoint, stages.checkpoint.config
    files = {**created.files, **text_files(stages), **_pooling_files(stages, read)}
    sources = {digest: store.path(digest) for digest in files.values()}
    executables = []
    for shape, entry in created.executables:
        blob = entry.outputs["executable"]
        sources[blob.digest] = store.path(blob)
        batch, tokens = shape or (None, None)
        executables.append({
            "phase": "encode" if shape else "any", "batch": batch, "query": tokens, "context": 0 if shape else None,
            "state": target.state, "buckets": 1 if shape else len(plan.buckets), "key": entry.key.digest,
            "blob": blob.digest,
        })  # fmt: skip
    width = _width(config, read)
    recorded, tools = target.recorded(options), target.toolchain()
    manifest = Manifest.create(
        llmc=__version__, device=options.device, target=target.name, executor=recorded.executor,
        model={
            "name": checkpoint.name, "architecture": config["model_type"], "vocab_size": config["vocab_size"],
            "task": plan.task, "width": width, "special_tokens": checkpoint.special_tokens(),
        },
        options={
            "task": plan.task, "quantize": options.quantize, "dtype": options.dtype, "specialise": options.specialise,
            "static_dims": ["batch", "query"] if options.specialise else [], "choice": choice, **created.facts,
            **({"analysis": analysis} if analysis else {}),
        },
        plan=plan.to_dict(), executables=executables, files=files,
        blobs={digest: path.stat().st_size for digest, path in sources.items()}, toolchain=tools,
        isa=list(recorded.features),
        provenance=provenance(stages, target.name, recorded, tools, options, checkpoint.requested),
    )  # fmt: skip
    return manifest, sources


def _width(config: Mapping[str, Any], read: Read) -> int:
    """Values per row of the graphs' output: of a hidden state, or labels."""
    if read.description.task == "embed":
        return int(config.get("hidden_size", config.get("dim", 0)))
    return 1 if read.description.template is not None else labels_of(config)


def _pooling_files(stages: Stages, read: Read) -> dict[str, str]:
    import numpy as np

    found = {POOLING: stages.store.put_bytes(read.description.to_json()).digest}
    if read.arrays:
        held = io.BytesIO()
        arrays: dict[str, Any] = dict(sorted(read.arrays.items()))
        np.savez(held, **arrays)
        found[WEIGHTS] = stages.store.put_bytes(held.getvalue()).digest
    return found


def programs_of_encoder(
    checkpoint: Checkpoint, plan: EncodePlan, options: CompileOptions, store: Store, phase: str, report: Reporter
) -> Iterator[tuple[str, str]]:
    """Programs with their names: traced ("program"), or lowered. Raises the errors of `compile_encoder`."""
    target, _ = open_encoder_target(options.device)
    options = target.configure(options)
    target.toolchain()
    case = EncoderCase.of(checkpoint, plan.task)  # type: ignore[arg-type] # what a plan to encode has
    stages = Stages(store, checkpoint, plan, report)
    if phase == "program":
        yield from target.traced(stages, case, options)
    else:
        yield from target.lowered(stages, plan, case, options)


_BYTES = {"none": 4, "int8": 1}
"""Bytes of a weight in a bundle, by quantisation."""


class _Walk(LookupStages):
    """Continues after missing executables; `why` has the reason for each of them."""

    def __init__(self, stages: Stages) -> None:
        super().__init__(stages)
        self.why: list[str | None] = []

    def run(self, kind: str, components: Mapping[str, Any], build: object) -> Entry:
        try:
            entry = super().run(kind, components, build)
        except NotBuiltError as missing:
            if kind != EXECUTABLE:
                raise
            self.why.append(str(missing))
            return None  # type: ignore[return-value] # only the bundle uses an executable
        self.why += [None] if kind == EXECUTABLE else []
        return entry


def dry_run_encoder(checkpoint: Checkpoint, plan: EncodePlan, options: CompileOptions, store: Store) -> dict[str, Any]:
    """`pipeline.dry_run.dry_run` for models that embed or score; seconds are those of the store's last builds.

    Raises the errors of `compile_encoder`; builds nothing.
    """
    target, chosen = open_encoder_target(options.device)
    options = target.configure(options)
    target.toolchain()
    case = EncoderCase.of(checkpoint, plan.task)  # type: ignore[arg-type]
    walk = _Walk(Stages(store, checkpoint, plan, ignore))
    shapes = [(b.batch, b.query) for b in plan.buckets] if options.specialise else [None]
    why: list[str | None]
    try:
        target.make(walk, plan, case, replace(options, jobs=1))  # one after the other, in the order of the list
        why = walk.why or [None]
    except NotBuiltError as missing:
        why = [str(missing)] * len(shapes)
    executables = [
        {
            "phase": "encode" if shape else "any", "batch": shape and shape[0], "query": shape and shape[1],
            "context": 0 if shape else None, "buckets": 1 if shape else len(plan.buckets), "cached": reason is None,
            "why": reason,
        }
        for shape, reason in zip(shapes, why, strict=True)
    ]  # fmt: skip
    to_build = sum(reason is not None for reason in why)
    return {
        "device": options.device, "choice": "; ".join(filter(None, (target.choice(options), chosen))),
        "executables": executables, "to_build": to_build, "cached": len(why) - to_build,
        "estimated_seconds": _seconds(store, walk, to_build),
        "estimated_bytes": sum(w.count for w in weights_of(checkpoint)) * _BYTES[str(options.quantize)],
        "warnings": [], "estimates": [],
    }  # fmt: skip


def _seconds(store: Store, walk: _Walk, to_build: int) -> float | None:
    """Seconds for everything missing except verification; None without a measured build."""
    if not to_build:
        return 0.0
    shared = 0.0 if walk.why else typical(store.entries("encoder"))
    each = typical(store.entries(EXECUTABLE))
    return None if shared is None else round(shared + to_build * (each or 0.0), 1)
