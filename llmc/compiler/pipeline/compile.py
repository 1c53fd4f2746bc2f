"""Compile a checkpoint into a verified bundle: prepare once, one executable a shape, verify, publish.

Every step is a cached stage (stages.py), so that a compile that was interrupted, or whose plan grew by a bucket, only
does what is missing.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.artifacts.bundle.manifest import Manifest
from llmc.artifacts.bundle.manifest_schema import STARTER_NAME
from llmc.artifacts.bundle.stored import remember_bundle
from llmc.artifacts.bundle.writer import check_replaceable, write_bundle
from llmc.artifacts.digest import parse
from llmc.artifacts.key import Key
from llmc.artifacts.local.origins import remember_recorded
from llmc.compiler.code import code_digest
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.bind import why_unverified
from llmc.compiler.pipeline.provenance import model_facts, provenance, remember_model
from llmc.compiler.pipeline.resolve import Job
from llmc.compiler.pipeline.verification import verify_stage
from llmc.compiler.stages import StageReport, Stages, filled_folder
from llmc.compiler.targets import open_target
from llmc.compiler.targets.base import Executable, Lowered, Shape, Target
from llmc.compiler.targets.unfit import UnfitError
from llmc.compiler.targets.workers import Jobs
from llmc.compiler.text.files import text_files
from llmc.errors import DeviceError
from llmc.version import __version__

if TYPE_CHECKING:
    from llmc.artifacts.digest import Blob
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.store import Store
    from llmc.artifacts.store.workspace import Workspace
    from llmc.buckets.plan import Plan
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.settings import Settings


@dataclass(frozen=True)
class ExecutableReport:
    """An executable is there: number `index` of `total`."""

    index: int
    total: int
    shape: Shape
    cached: bool
    seconds: float
    size: int
    state: str


@dataclass(frozen=True)
class VerifyReport:
    """Verification has done `done` of `total` parts."""

    done: int
    total: int


Event = StageReport | ExecutableReport | VerifyReport
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
    finished: dict[str, Any] = field(default_factory=dict)
    """What finishing on this host did (pipeline/finish.py); empty where nothing was finished."""

    host_files: list[str] = field(default_factory=list)
    """Files for the device's own host that lie beside the bundle (`Target.host_files`)."""

    left_out: dict[str, int] = field(default_factory=dict)
    """Modules beside the text part → how many tensors they have (`Checkpoint.left_out`)."""

    notices: list[str] = field(default_factory=list)
    """What of the checkpoint is not read, a line each (`Checkpoint.notices`)."""

    def to_json(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def compile_bundle(
    model: str | Checkpoint, destination: Path, plan: Plan, options: CompileOptions, store: Store, report: Reporter,
    settings: Settings | None = None,
) -> CompileResult:  # fmt: skip
    """Compile `model` for `options.device` into the bundle folder `destination`; `settings`: the environment's.

    Raises CheckpointError, CompileError, VerificationError, DeviceError, CapacityError or ArtifactError; then
    `destination` is as it was.
    """
    start = time.perf_counter()
    job = Job.of(model, plan, options, settings)
    target, checkpoint = job.target, job.checkpoint
    target.toolchain()  # missing packages are reported before anything is made
    require_native(target, job.options)
    unverified = why_unverified(target, checkpoint, job.options)
    check_replaceable(Path(os.path.realpath(destination)))
    seconds: dict[str, float] = {}

    def on_stage(event: StageReport) -> None:
        if event.seconds is not None:
            seconds[event.name] = round(event.seconds, 3)
        report(event)

    stages = Stages(store, checkpoint, plan, on_stage, target.settings)
    because = f"{target.executor}: {job.why}" if job.why else ""
    made = _make(stages, target, job.asked, job.options, report, unverified, because)
    options, choice = made.options, made.choice
    final, sources, entries = made.manifest, made.sources, list(made.entries)
    starter = target.starter(options)
    if starter is not None:
        quick = _make(stages, starter[0], None, starter[1], report, unverified, "")
        entries += quick.entries
        final, sources = _with_starter(stages, made, quick)
    remember_recorded(store, final)
    write_bundle(destination, final, sources)
    remember_bundle(store, final)
    remember_model(store, stages.checkpoint_digest(), checkpoint.asked)
    built = sum(not hit for _, hit in entries)
    states = [e.state for e in final.executables]
    return CompileResult(
        bundle=str(destination), device=options.device, built=built, reused=len(entries) - built,
        portable=states.count("portable"), native=states.count("native"),
        seconds=round(time.perf_counter() - start, 3), bytes=final.size,
        weights_bytes=sum(final.blobs[d] for n, d in final.files.items() if n.startswith("weights")),
        specialised=bool(target.static_dims(options)), sample_top_k=options.sample_top_k,
        choice=choice, remaining=target.remaining(), analysis=made.analysis,
        stages=seconds, verification=dict(final.verification), left_out=dict(checkpoint.left_out),
        notices=list(checkpoint.notices),
    )  # fmt: skip


@dataclass(frozen=True)
class _Made:
    """A verified manifest, the file of each blob it names, and the entries of its executables. `options` are those that
    they were made with, `choice` says why."""

    manifest: Manifest
    sources: Mapping[str, Path]
    entries: Sequence[tuple[Entry, bool]]
    analysis: dict[str, Any]
    options: CompileOptions
    choice: str


def lowered(
    stages: Stages, target: Target, asked: CompileOptions | None, options: CompileOptions
) -> tuple[Lowered, CompileOptions, str]:  # fmt: skip
    """The lowered programs, the options that fit the model, and the reason if these differ from `options`.

    `asked` are those that were asked for, None for none.
    """
    try:
        return target.lower(stages, target.trace(stages, options), options), options, ""
    except UnfitError as e:
        if asked is not None and any(asked.get(name) not in (None, "auto") for name in e.instead):
            raise
        options = options.changed(**e.instead)
        return target.lower(stages, target.trace(stages, options), options), options, e.why


def _make(
    stages: Stages, target: Target, asked: CompileOptions | None, options: CompileOptions, report: Reporter,
    unverified: str | None, because: str,
) -> _Made:  # fmt: skip
    """Trace, lower, compile and verify for one target. `options` are what it makes of those that were `asked` for, None
    for none, and `because` says why it is this target."""
    made, options, changed = lowered(stages, target, asked, options)
    choice = "; ".join(filter(None, (target.choice(options), because, changed)))
    shapes = target.shapes(stages.plan.buckets, options)
    entries = _executables(stages, target, made, shapes, options, report)
    files = [stages.store.path(e.outputs["executable"]) for e, _ in entries]
    analysis = target.analyse(stages, made, files, options)
    manifest, sources = _assemble(stages, target, made, shapes, entries, options, analysis, choice)
    if unverified is not None:
        verification: dict[str, Any] = {"mode": "none", "why": unverified}
    elif options.verify != "none":
        verification = verify_stage(stages, target, manifest, sources, options, lambda d, t: report(VerifyReport(d, t)))
    else:
        verification = {"mode": "none"}
    final = Manifest.create(**_members(manifest) | {"verification": verification})
    return _Made(final, sources, entries, analysis, options, choice)


def _with_starter(stages: Stages, made: _Made, quick: _Made) -> tuple[Manifest, dict[str, Path]]:
    """The bundle with the quick one's manifest as a file, and the blobs of both."""

    def build(workspace: Workspace) -> Mapping[str, Blob]:
        return {"manifest": workspace.put_bytes(quick.manifest.to_bytes())}

    blob = stages.run("starter", {"manifest": quick.manifest.digest}, build).outputs["manifest"]
    members = _members(made.manifest)
    members["files"] = members["files"] | {STARTER_NAME: blob.digest}
    members["blobs"] = members["blobs"] | dict(quick.manifest.blobs) | {blob.digest: blob.size}
    return Manifest.create(**members), {**made.sources, **quick.sources, blob.digest: stages.store.path(blob)}


def require_native(target: Target, options: CompileOptions) -> None:
    """Raise DeviceError where `--require-native` asks for what this host cannot make."""
    finisher = target.finisher()
    if options.require_native and target.state != "native" and (finisher is None or finisher.lacks()):
        why = f" ({finisher.lacks()})" if finisher is not None else ""
        raise DeviceError(
            f"--require-native: executables for {target.name} are only portable on this host{why}; left for the "
            f"device's own host: {target.remaining()}"
        )


def executable_key(target: Target, lowered: Lowered, shape: Shape, options: CompileOptions) -> Key:
    """The key of one executable, in named components."""
    return Key(
        "executable",
        {
            **{f"input.{k}": v for k, v in lowered.components.items()},
            **{f"toolchain.{k}": v for k, v in target.toolchain().items()},
            "isa": " ".join(target.isa()),
            "target": target.name,
            "state": target.state,
            "option.quantize": options.quantize,
            "option.dtype": options.dtype,
            **{f"option.{name}": value for name, value in target.shaping(options).items()},
            "shape.phase": shape.phase,
            "shape.batch": shape.batch,
            "shape.query": shape.query,
            "shape.context": shape.context,
            "code": code_digest(target.compile),
        },
    )


def _executables(
    stages: Stages, target: Target, lowered: Lowered, shapes: Sequence[Shape], options: CompileOptions,
    report: Reporter,
) -> list[tuple[Entry, bool]]:  # fmt: skip
    """One entry a shape, in order, with whether it was in the store; missing ones are made by parallel jobs."""
    with ExitStack() as stack:
        linked = threading.Lock()
        apart = target.fresh_process or (target.needs_processes and options.jobs > 1)
        jobs = stack.enter_context(Jobs(options.jobs, target.workers if apart else None))

        def ready() -> Lowered:
            nonlocal lowered
            with linked:
                if lowered.folder == Path():
                    lowered = replace(lowered, folder=stack.enter_context(_linked(stages.store, lowered)))
            return lowered

        def build(shape: Shape) -> tuple[Entry, bool, float]:
            began = time.perf_counter()

            def make(workspace: Workspace) -> Mapping[str, Blob]:
                at = time.perf_counter()
                inputs = ready()
                if apart:
                    made = jobs.apart(str(shape), compile_in_worker, options.device, inputs, shape, options)
                else:
                    made = target.compile(inputs, shape, options)
                workspace.meta |= {"state": made.state, "seconds": round(time.perf_counter() - at, 3)}
                return {"executable": workspace.put_bytes(made.data)}

            entry, hit = stages.store.get_or_build(executable_key(target, lowered, shape, options), make)
            return entry, hit, time.perf_counter() - began

        done = 0

        def tell(shape: Shape, made: tuple[Entry, bool, float]) -> None:
            nonlocal done
            entry, hit, seconds = made
            done += 1
            size = entry.outputs["executable"].size
            report(ExecutableReport(done, len(shapes), shape, hit, seconds, size, entry.meta["state"]))

        return [(entry, hit) for entry, hit, _ in jobs.each(build, shapes, tell)]


def compile_in_worker(device: str, lowered: Lowered, shape: Shape, options: CompileOptions) -> Executable:
    """Compile one shape in a worker process."""
    return open_target(device).compile(lowered, shape, options)


def _linked(store: Store, lowered: Lowered) -> AbstractContextManager[Path]:
    """A folder with the shared files under the names that executables refer to them by."""

    def link(folder: Path) -> Path:
        for digest in sorted(set(lowered.files.values())):  # files may be alike
            target = folder / parse(digest)
            try:
                target.hardlink_to(store.path(digest))
            except OSError:
                shutil.copyfile(store.path(digest), target)
        return folder

    return filled_folder(store, "files", link)


def _assemble(
    stages: Stages, target: Target, lowered: Lowered, shapes: Sequence[Shape],
    entries: Sequence[tuple[Entry, bool]], options: CompileOptions, analysis: Mapping[str, Any], choice: str,
) -> tuple[Manifest, dict[str, Path]]:  # fmt: skip
    """The manifest without its verification, and the file of each blob it names."""
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
            "state": entry.meta["state"], "buckets": shape.buckets, "key": entry.key.digest,
            "blob": add(*entry.outputs["executable"]),
        }
        for shape, (entry, _) in zip(shapes, entries, strict=True)
    ]  # fmt: skip
    files = {name: add(digest) for name, digest in lowered.files.items()}
    files |= {name: add(digest) for name, digest in text_files(stages).items()}
    manifest = Manifest.create(
        llmc=__version__, device=options.device, target=target.name, executor=target.executor_of(options),
        model=model_facts(checkpoint, target.held(stages, options)),
        options={
            "quantize": options.quantize, "dtype": options.dtype, "specialise": options.specialise,
            "static_dims": list(target.static_dims(options)), "choice": choice,
            "remaining": target.remaining(), **options.extensions, **target.manifest_options(options),
            **({"analysis": analysis} if analysis else {}),
        },
        plan=stages.plan.to_dict(), executables=executables, files=files, blobs=blobs,
        toolchain=target.toolchain(), isa=list(target.needed_features(options)),
        provenance=provenance(stages, target, options, checkpoint.asked),
    )  # fmt: skip
    return manifest, sources


def _members(manifest: Manifest) -> dict[str, Any]:
    return {k: v for k, v in manifest.to_dict().items() if k not in ("schema", "kind")}
