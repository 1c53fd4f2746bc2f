"""Compile a checkpoint into a verified bundle: prepare once, compile one executable per shape, verify, publish.

Every step is a cached stage (stages.py). A compile that was interrupted, or whose plan gained a bucket, runs only the
missing stages.

A dry run describes which stages and executables are in the store, and estimates time and size.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.artifacts.bundle.manifest import STARTER_NAME, Manifest
from llmc.artifacts.bundle.stored import remember_bundle
from llmc.artifacts.bundle.writer import check_replaceable, write_bundle
from llmc.artifacts.key import Key
from llmc.artifacts.local.origins import remember_recorded
from llmc.compiler.architectures.shared.architectures import size_of
from llmc.compiler.estimates.footprint import Footprint
from llmc.compiler.model_size import weights_in
from llmc.compiler.options import CompileOptions, UnfitError
from llmc.compiler.pipeline.bind import why_unverified
from llmc.compiler.pipeline.executors import open_executor
from llmc.compiler.pipeline.executors.base import BuiltExecutable, CompileWork, executable_key
from llmc.compiler.pipeline.provenance import model_facts, provenance, remember_model
from llmc.compiler.pipeline.resolve import CompileJob
from llmc.compiler.pipeline.verification import probes_stage, verify_stage
from llmc.compiler.stages import StageReport, Stages
from llmc.compiler.targets.base import Lowered, Shape, Target, cache_for
from llmc.compiler.text import text_files
from llmc.errors import CheckpointError, DeviceError, LlmcError
from llmc.version import __version__

if TYPE_CHECKING:
    from llmc.artifacts.digest import Blob
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.store import Store
    from llmc.artifacts.store.workspace import Workspace
    from llmc.buckets.plan import Plan
    from llmc.compiler.architectures.shared.size import ModelSize
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.settings import Settings


@dataclass(frozen=True)
class ExecutableReport:
    """Executable `index` of `total` is ready."""

    index: int
    total: int
    shape: Shape
    cached: bool
    seconds: float
    size: int
    state: str


@dataclass(frozen=True)
class VerifyReport:
    """Verification has finished `done` of `total` parts."""

    done: int
    total: int


@dataclass(frozen=True)
class BeginReport:
    """A compile begins, with an estimate of `expected` seconds; computing the estimate reads the store."""

    expected: Callable[[], float]


Event = BeginReport | StageReport | ExecutableReport | VerifyReport
Reporter = Callable[[Event], None]


@dataclass(frozen=True)
class CompileResult:
    """Outcome of a compile; sizes in bytes, times in seconds."""

    bundle: str
    device: str
    built: int
    reused: int
    portable: int
    native: int
    seconds: float
    bytes: int
    weights_bytes: int
    specialised: bool
    sample_top_k: int
    choice: str
    remaining: str
    analysis: dict[str, Any]
    stages: dict[str, float]
    verification: dict[str, Any]
    on_target: dict[str, Any] = field(default_factory=dict)
    """Outcome of on-target compilation on this host (pipeline/on_target.py); empty without it."""

    host_files: list[str] = field(default_factory=list)
    """Files for the device's own host next to the bundle (`OnTargetCompiler.host_files`)."""

    left_out: dict[str, int] = field(default_factory=dict)
    """Modules outside the text part → their number of tensors (`Checkpoint.left_out`)."""

    notices: list[str] = field(default_factory=list)
    """Unread parts of the checkpoint, a line each (`Checkpoint.notices`)."""

    described: list[str] = field(default_factory=list)
    """The analysis for people, a line each (`Target.describe`)."""

    def to_json(self) -> dict[str, Any]:
        """The result for --json, without `described`, which repeats the analysis."""
        found = asdict(self)
        del found["described"]
        return found


def compile_bundle(
    model: str | Checkpoint, destination: Path, plan: Plan, options: CompileOptions, store: Store, report: Reporter,
    settings: Settings | None = None,
) -> CompileResult:  # fmt: skip
    """Run `compile_job` on `model` for `options.device`; `settings` default to the environment's."""
    return compile_job(CompileJob.of(model, plan, options, settings), destination, store, report)


def compile_job(job: CompileJob, destination: Path, store: Store, report: Reporter) -> CompileResult:
    """Compile a job into the bundle folder `destination`.

    Raises CheckpointError, CompileError, VerificationError, DeviceError, CapacityError or ArtifactError; then
    `destination` stays unchanged.
    """
    start = time.perf_counter()
    target, checkpoint = job.target, job.checkpoint
    target.toolchain()  # reports missing packages before any work
    require_native(target, job.options)
    store.require_usable(Key("executable", {"target": target.description.name, "state": target.state}))
    unverified = why_unverified(target, checkpoint, job.options)
    check_replaceable(Path(os.path.realpath(destination)))
    seconds: dict[str, float] = {}

    def on_stage(event: StageReport) -> None:
        if event.seconds is not None:
            seconds[event.name] = round(event.seconds, 3)
        report(event)

    stages = Stages(store, checkpoint, job.plan, on_stage, target.settings)
    created = _make(stages, target, job.requested, job.options, report, unverified, job.because, job.decided)
    options, choice = created.options, created.choice
    final, sources, entries = created.manifest, created.sources, list(created.entries)
    if job.starter is not None:
        quick = _make(stages, job.starter[0], None, job.starter[1], report, unverified)
        entries += quick.entries
        final, sources = _with_starter(stages, created, quick)
    publish(stages, destination, final, sources)
    built = sum(not created.cached for created in entries)
    states = [e.state for e in final.executables]
    return CompileResult(
        bundle=str(destination), device=options.device, built=built, reused=len(entries) - built,
        portable=states.count("portable"), native=states.count("native"),
        seconds=round(time.perf_counter() - start, 3), bytes=final.size,
        weights_bytes=sum(final.blobs[d] for n, d in final.files.items() if n.startswith("weights")),
        specialised=bool(target.fixes(options).dims), sample_top_k=options.sample_top_k,
        choice=choice, remaining=target.remaining(), analysis=created.analysis,
        described=job.opened.describe(created.analysis) if created.analysis else [],
        stages=seconds, verification=dict(final.verification), left_out=dict(checkpoint.left_out),
        notices=list(checkpoint.notices),
    )  # fmt: skip


def publish(stages: Stages, destination: Path, manifest: Manifest, sources: Mapping[str, Path]) -> None:
    """Write the bundle, and record in the store the bundle, its verification, and the checkpoint's location."""
    remember_recorded(stages.store, manifest)
    write_bundle(destination, manifest, sources)
    remember_bundle(stages.store, manifest)
    remember_model(stages.store, stages.checkpoint_digest(), stages.checkpoint.requested)


@dataclass(frozen=True)
class _Built:
    """A verified manifest, the file of each blob that it names, and its executables' entries. `options` are those of
    the compile, and `choice` is the reason for them."""

    manifest: Manifest
    sources: Mapping[str, Path]
    entries: Sequence[BuiltExecutable]
    analysis: dict[str, Any]
    options: CompileOptions
    choice: str


def lowered(
    stages: Stages, target: Target, requested: CompileOptions | None, options: CompileOptions
) -> tuple[Lowered, CompileOptions, str]:  # fmt: skip
    """The lowered programs, the options that fit the model, and the reason if these differ from `options`.

    `requested` are the user's options, or None.
    """
    try:
        return target.lower(stages, target.trace(stages, options), options), options, ""
    except UnfitError as e:
        if requested is not None and any(requested.get(name) not in (None, "auto") for name in e.instead):
            raise
        options = options.changed(**e.instead)
        if requested is not None and requested.quantize is None:  # that default was for the options that do not fit
            options = replace(options, quantize=target.configure(requested).quantize)
        return target.lower(stages, target.trace(stages, options), options), options, e.why


def _make(
    stages: Stages, target: Target, requested: CompileOptions | None, options: CompileOptions, report: Reporter,
    unverified: str | None, because: str = "", decided: str = "",
) -> _Built:  # fmt: skip
    """Trace, lower, compile and verify for one target.

    `options` are `requested` as the target configured them; None means no request. `because` is the reason for this
    target, and `decided` the reason for the model's defaults, if they fit.
    """
    created, options, changed = lowered(stages, target, requested, options)
    choice = "; ".join(filter(None, (target.fixes(options).why, because, changed or decided)))
    shapes = target.shapes(stages.plan.buckets, options)
    entries = _executables(stages, target, created, shapes, options, report)
    files = [stages.store.path(created.entry.outputs["executable"]) for created in entries]
    analysis = target.analyse(stages, created, files, options)
    manifest, sources = _assemble(stages, target, created, shapes, entries, options, analysis, choice)
    if unverified is not None:
        verification: dict[str, Any] = {"mode": "none", "why": unverified}
    elif options.verify != "none":
        draft = _with_files(stages, manifest, sources, created.stand_ins)
        verification = verify_stage(stages, target, *draft, options, lambda d, t: report(VerifyReport(d, t)))
        if created.stand_ins:
            verification["stand_ins"] = sorted(created.stand_ins)
    else:
        verification = {"mode": "none"}
    final = manifest.changed(verification=verification)
    return _Built(final, sources, entries, analysis, options, choice)


def _with_starter(stages: Stages, created: _Built, quick: _Built) -> tuple[Manifest, dict[str, Path]]:
    def build(workspace: Workspace) -> Mapping[str, Blob]:
        return {"manifest": workspace.put_bytes(quick.manifest.to_bytes())}

    blob = stages.run("starter", {"manifest": quick.manifest.digest}, build).outputs["manifest"]
    both = created.manifest.changed(blobs={**created.manifest.blobs, **quick.manifest.blobs})
    return _with_files(stages, both, {**created.sources, **quick.sources}, {STARTER_NAME: blob.digest})


def _with_files(
    stages: Stages, manifest: Manifest, sources: Mapping[str, Path], files: Mapping[str, str]
) -> tuple[Manifest, dict[str, Path]]:  # fmt: skip
    paths = {digest: stages.store.path(digest) for digest in files.values()}
    sizes = {digest: path.stat().st_size for digest, path in paths.items()}
    more = manifest.changed(files={**manifest.files, **files}, blobs={**manifest.blobs, **sizes})
    return more, {**sources, **paths}


def require_native(target: Target, options: CompileOptions) -> None:
    """Raise DeviceError where `--require-native` requests executables that this host cannot build."""
    on_target = target.on_target()
    if options.require_native and target.state != "native" and (on_target is None or on_target.lacks()):
        why = f" ({on_target.lacks()})" if on_target is not None else ""
        raise DeviceError(
            f"--require-native: executables for {target.description.name} are only portable on this host{why}; left "
            f"for the device's own host: {target.remaining()}"
        )


def _executables(
    stages: Stages, target: Target, lowered: Lowered, shapes: Sequence[Shape], options: CompileOptions,
    report: Reporter,
) -> list[BuiltExecutable]:  # fmt: skip
    done = count(1)

    def on_progress(shape: Shape, created: BuiltExecutable) -> None:
        entry, size = created.entry, created.entry.outputs["executable"].size
        at = next(done)
        report(ExecutableReport(at, len(shapes), shape, created.cached, created.seconds, size, entry.meta["state"]))

    work = CompileWork(stages.store, target, lowered, options, stages.settings)
    return open_executor(options).compile(work, shapes, on_progress)


def _assemble(
    stages: Stages, target: Target, lowered: Lowered, shapes: Sequence[Shape],
    entries: Sequence[BuiltExecutable], options: CompileOptions, analysis: Mapping[str, Any], choice: str,
) -> tuple[Manifest, dict[str, Path]]:  # fmt: skip
    """The manifest without its verification, and the file of each blob that it names."""
    store, checkpoint = stages.store, stages.checkpoint
    sources: dict[str, Path] = {}
    blobs: dict[str, int] = {}

    def add(digest: str, size: int | None = None) -> str:
        sources[digest] = store.path(digest)
        blobs[digest] = sources[digest].stat().st_size if size is None else size
        return digest

    executables = [
        {
            "phase": shape.phase, "batch": shape.batch, "query": shape.query, "context": shape.context,
            "state": created.entry.meta["state"], "buckets": shape.buckets, "key": created.entry.key.digest,
            "blob": add(*created.entry.outputs["executable"]),
        }
        for shape, created in zip(shapes, entries, strict=True)
    ]  # fmt: skip
    files = {name: add(digest) for name, digest in lowered.files.items()}
    files |= {name: add(digest) for name, digest in text_files(stages).items()}
    recorded, tools = target.recorded(options), target.toolchain()
    manifest = Manifest.create(
        llmc=__version__, device=options.device, target=target.description.name, executor=recorded.executor,
        model=model_facts(checkpoint, cache_for(target, stages, options)),
        options={
            "quantize": options.quantize, "dtype": options.dtype, "specialise": options.specialise,
            "static_dims": list(target.fixes(options).dims), "choice": choice,
            "remaining": target.remaining(), **options.extensions, **recorded.options,
            **({"analysis": analysis} if analysis else {}),
        },
        plan=stages.plan.to_dict(), executables=executables, files=files, blobs=blobs,
        toolchain=tools, isa=list(recorded.features),
        provenance=provenance(stages, target.description.name, recorded, tools, options, checkpoint.requested),
    )  # fmt: skip
    return manifest, sources


class NotBuiltError(LlmcError):
    """A stage is not in the store and has to run."""


class LookupStages(Stages):
    """Stages that are only looked up, never run.

    The first missing one ends the walk (NotBuiltError); `found` are those before it.
    """

    def __init__(self, stages: Stages) -> None:
        super().__init__(stages.store, stages.checkpoint, stages.plan, ignore)
        self.found: set[str] = set()

    def run(self, kind: str, components: Mapping[str, Any], build: object) -> Entry:
        """Look up the stage's entry in the store."""
        key = Key(kind, components)
        entry = self.store.lookup(key)
        if entry is None:
            raise NotBuiltError(f"stage {kind} has to run: {self.store.why(key)}")
        self.found.add(kind)
        return entry


def ignore(_: StageReport) -> None:
    """Ignore a report."""


def dry_run(job: CompileJob, store: Store) -> dict[str, Any]:
    """Describe what a compile would do: shapes with whether they are cached, and estimates of time (s) and size
    (bytes).

    Times come from the last builds of the same kind in the store, where there are any. Builds nothing.
    """
    require_native(job.target, job.options)
    why_unverified(job.target, job.checkpoint, job.options)
    stages = Stages(store, job.checkpoint, job.plan, ignore, job.target.settings)
    found = _estimate(job.target, stages, job.options)
    return found | {"choice": "; ".join(filter(None, (found["choice"], job.because, job.decided)))}


def _estimate(target: Target, stages: Stages, options: CompileOptions) -> dict[str, Any]:
    """Shapes with `cached` (None when a stage still to run decides it) and `why` not, seconds and bytes."""
    lookup = LookupStages(stages)
    shapes = target.shapes(stages.plan.buckets, options)
    known = None
    why: list[str | None] = [None] * len(shapes)
    try:
        known = target.lower(lookup, target.trace(lookup, options), options)
        keys = [executable_key(target, known, shape, options) for shape in shapes]
        cached: list[bool | None] = [stages.store.lookup(key) is not None for key in keys]
        why = [None if hit else stages.store.why(key) for key, hit in zip(keys, cached, strict=True)]
    except NotBuiltError as missing:
        cached = [None] * len(shapes)
        why = [str(missing)] * len(shapes)
    size = _size_of(stages)
    footprint = Footprint(
        size, target, options, stages.plan.limits, stages.store, weights=weights_in(stages.checkpoint)
    )
    to_build, buckets = sum(not c for c in cached), stages.plan.buckets
    seconds = to_build * footprint.seconds_each
    if known is None:
        seconds += sum(footprint.durations.stages(buckets, lookup.found).values())
    if to_build:
        seconds += footprint.verification_seconds(buckets, _reference_missing(lookup, target))
    estimates = footprint.estimates(stages.plan.buckets)
    return {
        "device": options.device,
        "choice": target.fixes(options).why,
        "executables": [
            asdict(s) | {"cached": c, "why": reason} for s, c, reason in zip(shapes, cached, why, strict=True)
        ],
        "to_build": to_build,
        "cached": sum(bool(c) for c in cached),
        "estimated_seconds": round(seconds, 1),
        "estimated_bytes": footprint.bundle_bytes(buckets),
        "warnings": footprint.warnings(buckets),
        "estimates": [estimate.to_dict() for estimate in estimates],
    }


def _reference_missing(lookup: LookupStages, target: Target) -> bool:
    try:
        probes_stage(lookup, target)
    except NotBuiltError:
        return True
    return False


def _size_of(stages: Stages) -> ModelSize | None:
    """The model's sizes, or None for an architecture whose config has other keys for them."""
    try:
        return size_of(stages.checkpoint.config, stages.checkpoint.name)
    except CheckpointError:
        return None
