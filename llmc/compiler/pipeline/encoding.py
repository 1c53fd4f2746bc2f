"""Compile a checkpoint that embeds or scores: plan, trace once, compile, verify, publish."""

from __future__ import annotations

import io
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.artifacts.bundle.manifest import Manifest
from llmc.artifacts.bundle.stored import remember_bundle
from llmc.artifacts.bundle.writer import check_replaceable, write_bundle
from llmc.artifacts.key import Key
from llmc.artifacts.local.origins import remember_recorded
from llmc.buckets.encoding import EncodePlan, encode_plan, traffic_plan
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.checkpoint.sentence_files import labels_of, read_description, task_of
from llmc.compiler.options import LOCAL
from llmc.compiler.pipeline.compile import CompileResult, Reporter
from llmc.compiler.pipeline.encoding_verification import verification_of
from llmc.compiler.pipeline.provenance import provenance, remember_model
from llmc.compiler.stages import StageReport, Stages
from llmc.compiler.targets.encoder import CompiledEncoder, EncoderCase, EncoderTarget, open_encoder_target
from llmc.compiler.text.files import text_files
from llmc.errors import InputError, UnknownNameError
from llmc.runtime.pooling.modules import POOLING, WEIGHTS, Task
from llmc.version import __version__

if TYPE_CHECKING:
    from llmc.artifacts.store.store import Store
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.checkpoint.sentence_files import Read
    from llmc.compiler.options import CompileOptions

GENERATE = "generate"
TASKS = (GENERATE, "embed", "score")


def settled_task(checkpoint: Checkpoint, asked: str | None) -> Task | None:
    """The task that was asked for, or the checkpoint's own; None: to generate. Raises UnknownNameError."""
    if asked is not None and asked not in TASKS:
        raise UnknownNameError("task", asked, TASKS)
    if asked is None:
        return task_of(checkpoint)
    return None if asked == GENERATE else asked  # type: ignore[return-value] # one of TASKS


def plan_encoder(checkpoint: Checkpoint, task: Task, **limits: Any) -> EncodePlan:
    """The plan for a checkpoint; `limits`: max_model_len, max_num_seqs, max_num_batched_tokens, where given; for
    recorded texts also `texts`, `max_graphs` and `facts` (buckets/encoding.py).

    Raises InputError for a length that the model's positions do not reach.
    """
    asked = limits.get("max_model_len")
    longest = read_description(checkpoint, task).description.max_length
    if asked is not None and asked > longest:
        raise InputError(f"--max-model-len {asked} is above the {longest} tokens of {checkpoint.asked}; lower it")
    given = {k: v for k, v in limits.items() if v is not None and k != "max_model_len"}
    if "texts" in given:
        return traffic_plan(task, max_length=asked or longest, **given)
    return encode_plan(task, asked or longest, **given)


EXECUTABLE = "executable"
"""The stage of one executable."""
LIMITS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")
"""What is planned by."""


def encoder_plan_of(checkpoint: Checkpoint, task: Task, plan: object, given: Mapping[str, Any]) -> EncodePlan:
    """`plan`, or one by LIMITS. Raises InputError for a plan of another task, and for further arguments."""
    asked = {name: value for name, value in given.items() if value is not None}
    if plan is not None:
        if not isinstance(plan, EncodePlan) or plan.task != task:
            raise InputError(f"the plan is not one to {task}: make it with llmc plan MODEL --task {task}")
        return plan
    if other := sorted(asked.keys() - set(LIMITS)):
        raise InputError(
            f"{', '.join(other)}: a model to {task} is planned by {', '.join(LIMITS)} alone; leave out the rest"
        )
    return plan_encoder(checkpoint, task, **asked)


def compile_encoder(
    model: str | Checkpoint, destination: Path, plan: EncodePlan, options: CompileOptions, store: Store,
    report: Reporter,
) -> CompileResult:  # fmt: skip
    """Compile `model` for `options.device` into the bundle folder `destination`.

    Raises as `compile_bundle` does; then `destination` is as it was.
    """
    start = time.perf_counter()
    if options.executor != LOCAL:
        raise InputError(
            f"--executor {options.executor}: models to {plan.task} are compiled on this host; leave it out"
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
        with telling:  # executables may be made in several threads
            total = len(plan.buckets) if event.name == EXECUTABLE and options.specialise else 1
            if event.seconds is not None:
                seconds[event.name] = round(seconds.get(event.name, 0) + event.seconds, 3)
                stored[event.name] += event.cached
                ended[event.name] += 1
            report(replace(event, index=ended[event.name], total=total))

    stages = Stages(store, checkpoint, plan, on_stage)
    read = read_description(checkpoint, task, plan.limits.max_model_len)  # type: ignore[arg-type]
    case = EncoderCase.of(checkpoint, task)  # type: ignore[arg-type]
    made = target.make(stages, plan, case, options)
    analysis = target.analyse(stages, made, options)
    choice = "; ".join(filter(None, (target.choice(options), why)))
    manifest, sources = _assemble(stages, target, made, read, plan, options, analysis, choice)
    verification = verification_of(stages, target, manifest, sources, plan, case, options, report)
    final = manifest.changed(verification=verification)
    remember_recorded(store, final)
    write_bundle(destination, final, sources)
    remember_bundle(store, final)
    remember_model(store, stages.checkpoint_digest(), checkpoint.asked)
    states = [e.state for e in final.executables]
    reused = sum(stored[kind] for kind in {entry.key.kind for _, entry in made.executables})
    return CompileResult(
        bundle=str(destination), device=options.device, built=len(states) - reused, reused=reused,
        portable=states.count("portable"), native=states.count("native"),
        seconds=round(time.perf_counter() - start, 3), bytes=final.size,
        weights_bytes=final.blobs[final.files["weights"]] if "weights" in final.files else 0,
        specialised=bool(options.specialise), sample_top_k=0, choice=choice, remaining="", analysis=analysis,
        stages=seconds, verification=dict(final.verification),
    )  # fmt: skip


def _assemble(
    stages: Stages, target: EncoderTarget, made: CompiledEncoder, read: Read, plan: EncodePlan, options: CompileOptions,
    analysis: Mapping[str, Any], choice: str,
) -> tuple[Manifest, dict[str, Path]]:  # fmt: skip
    store, checkpoint, config = stages.store, stages.checkpoint, stages.checkpoint.config
    files = {**made.files, **text_files(stages), **_pooling_files(stages, read)}
    sources = {digest: store.path(digest) for digest in files.values()}
    executables = []
    for shape, entry in made.executables:
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
            "static_dims": ["batch", "query"] if options.specialise else [], "choice": choice, **made.facts,
            **({"analysis": analysis} if analysis else {}),
        },
        plan=plan.to_dict(), executables=executables, files=files,
        blobs={digest: path.stat().st_size for digest, path in sources.items()}, toolchain=tools,
        isa=list(recorded.features),
        provenance=provenance(stages, target.name, recorded, tools, options, checkpoint.asked),
    )  # fmt: skip
    return manifest, sources


def _width(config: Mapping[str, Any], read: Read) -> int:
    """Numbers of a row that the graphs return: of a state, or labels."""
    if read.description.task == "embed":
        return int(config.get("hidden_size", config.get("dim", 0)))
    return 1 if read.description.template is not None else labels_of(config)


def _pooling_files(stages: Stages, read: Read) -> dict[str, str]:
    """What follows the model, as files."""
    import numpy as np

    found = {POOLING: stages.store.put_bytes(read.description.to_json()).digest}
    if read.arrays:
        held = io.BytesIO()
        arrays: dict[str, Any] = dict(sorted(read.arrays.items()))
        np.savez(held, **arrays)
        found[WEIGHTS] = stages.store.put_bytes(held.getvalue()).digest
    return found
