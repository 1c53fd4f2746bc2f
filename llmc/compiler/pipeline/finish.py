"""Compile a portable bundle natively on its device's own host, from the bundle's own blobs; verify and publish it.

No checkpoint is needed. Each result is a cached stage of the store: an interrupted run resumes, and of two concurrent
runs one builds and the other waits. The finished bundle replaces the portable one atomically:

    executables  the native ones
    files        the old ones, the device's outputs, and "portable.json": the manifest of the portable bundle
    options      the old ones, the pinned ones, and "finished_for": {name: value}, what the executables are tied to
    verification the old one, and "finished": how they agree with the portable executables
    provenance   the old one, and "finished": {"manifest": digest of the portable manifest, "llmc": version}

All blobs of the portable bundle stay, which lets any host run it or compile it natively again. A signature covers one
manifest: that of the portable bundle does not cover the finished one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.artifacts.bundle.manifest import Manifest, read_manifest
from llmc.artifacts.bundle.manifest_schema import FILE_NAME, FINISHED_FOR, PORTABLE_NAME
from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.bundle.stored import remember_bundle
from llmc.artifacts.bundle.writer import check_replaceable, write_bundle
from llmc.artifacts.digest import is_digest
from llmc.artifacts.key import Key, Value
from llmc.compiler.code import code_digest
from llmc.compiler.pipeline.agree import agree
from llmc.compiler.pipeline.compile import BeginReport, CompileResult, ExecutableReport, Reporter, compile_job
from llmc.compiler.pipeline.dry_run import dry_run
from llmc.compiler.pipeline.journal import Journal
from llmc.compiler.pipeline.resolve import recorded_options, target_of
from llmc.compiler.targets.base import Shape
from llmc.compiler.targets.finishing import EachExecutable, WholeBundle
from llmc.errors import CompileError, DeviceError, InputError
from llmc.files import write_texts
from llmc.paths import is_dir
from llmc.runtime.bundle import Bundle
from llmc.settings import Settings
from llmc.version import __version__

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest_schema import Executable
    from llmc.artifacts.digest import Blob
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.store import Store
    from llmc.artifacts.store.workspace import Workspace
    from llmc.compiler.pipeline.resolve import CompileJob
    from llmc.compiler.targets.base import Target
    from llmc.compiler.targets.finishing import Finisher


@dataclass(frozen=True)
class FinishResult:
    """Outcome of on-target compilation; sizes in bytes, times in seconds.

    `finished_for` is what the executables are tied to, `files` are the device's outputs, and `unsigned` says whether
    the bundle lost a signature.
    """

    bundle: str
    device: str
    finished_for: dict[str, str]
    built: int
    reused: int
    portable: int
    native: int
    files: list[str]
    unsigned: bool
    seconds: float
    bytes: int
    verification: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The result for --json."""
        return asdict(self)


def compile_and_finish(job: CompileJob, destination: Path, store: Store, report: Reporter) -> CompileResult:
    """Run `compile_job`, and on the device's own host `finish_bundle` on its portable executables."""
    report(BeginReport(lambda: float(dry_run(job, store)["estimated_seconds"])))
    result = compile_job(job, destination, store, report)
    manifest = read_manifest(destination)
    if not result.portable or manifest.is_unbound or finisher_here(job.target) is None:
        return result
    options = job.options
    done = finish_bundle(
        destination, store, report, jobs=options.jobs, verify=options.verify, settings=job.target.settings,
        target=job.target,
    )  # fmt: skip
    return replace(
        result, portable=done.portable, native=done.native, seconds=round(result.seconds + done.seconds, 3),
        bytes=done.bytes, remaining="", finished=done.to_json(),
    )  # fmt: skip


def write_host_files(result: CompileResult, target: Target) -> CompileResult:
    """Write the files for the device's own host into the folder `BUNDLE.DEVICE` next to a portable bundle of `target`.

    The result has their names. Raises InputError where that folder cannot be written.
    """
    if not result.portable:
        return result
    bundle = Path(os.path.realpath(result.bundle))
    opened = Bundle(BundleFiles.open(bundle), Settings())
    folder = bundle.with_name(f"{bundle.name}.{target.description.name}")
    finisher = target.finisher()
    texts = {} if finisher is None else finisher.host_files(folder, bundle, opened.plan)
    names = write_texts(folder, texts, "files for the device's host") if texts else []
    return replace(result, host_files=[str(folder / name) for name in names])


def finisher_here(target: Target) -> Finisher | None:
    """The target's finisher for this host; None where nothing is portable, or this is not the device's host."""
    finisher = target.finisher()
    return None if finisher is None or finisher.lacks() else finisher


def is_finishable(folder: Path) -> bool:
    """Whether a folder is a bundle with portable or finished executables, without an interrupted compile."""
    if Journal.exists(folder) or not is_dir(folder) or not (folder / FILE_NAME).exists():
        return False
    manifest = read_manifest(folder)
    return PORTABLE_NAME in manifest.files or any(item.state == "portable" for item in manifest.executables)


def unfinished(bundle: Bundle) -> str:
    """Reason why a bundle still has to be compiled natively on this host; "" for none, or without weights."""
    if bundle.manifest.is_unbound:
        return ""
    if any(item.state == "portable" for item in bundle.manifest.executables):
        return "portable"
    wanted = bundle.manifest.options.get(FINISHED_FOR)
    finisher = None if wanted is None else finisher_here(target_of(bundle.manifest))
    return "finished for another host" if finisher is not None and finisher.host() != wanted else ""


def finish_bundle(
    path: Path, store: Store, report: Reporter, *, jobs: int = 1, verify: str = "sample",
    settings: Settings | None = None, target: Target | None = None,
) -> FinishResult:  # fmt: skip
    """Compile the bundle in the folder `path` natively for this host, in place; one that is already finished for it
    stays.

    `target` is the bundle's target; None opens it. Raises InputError for a bundle that has no portable executables,
    DeviceError where the device or its toolchain is missing, CompileError, VerificationError, ArtifactError,
    CapacityError or UnwritableError; then `path` stays unchanged.
    """
    began = time.perf_counter()
    settings = settings or Settings.from_environment()
    bundle = Bundle.open(path, settings)
    half = Bundle(bundle.files.portable_half(), settings)
    target = target or target_of(half.manifest)
    finisher = _require_finisher(half, target)
    check_replaceable(Path(os.path.realpath(path)))
    pins = finisher.pins(half)
    if isinstance(finisher, EachExecutable):
        created, reused = _each(finisher, half, pins, store, jobs, report)
        files: Mapping[str, Blob] = _programs(finisher, half, pins, store, jobs)
    elif isinstance(finisher, WholeBundle):
        entry, hit = _whole(finisher, half, pins, store, report)
        created, files, reused = {}, entry.outputs, len(half.manifest.executables) * hit
    else:
        raise CompileError(
            f"device {target.description.name}: {type(finisher).__name__} is neither an EachExecutable nor a "
            "WholeBundle"
        )
    manifest, sources = _assemble(half, finisher, pins, created, files, store)
    options = recorded_options(half.manifest, target).changed(verify=verify)
    outcome = agree(half, manifest, sources, finisher, target, options, store, report)
    final = manifest.changed(verification=dict(half.manifest.verification) | {"finished": outcome})
    signed = bundle.files.signature is not None and final != bundle.manifest
    write_bundle(path, final, sources)
    remember_bundle(store, final)
    states = [item.state for item in final.executables]
    return FinishResult(
        bundle=str(path), device=final.device, finished_for=dict(finisher.host()), built=len(states) - reused,
        reused=reused, portable=states.count("portable"), native=states.count("native"),
        files=[name for name in sorted(files) if not is_digest(name)],
        unsigned=signed, seconds=round(time.perf_counter() - began, 3), bytes=final.size, verification=outcome,
    )  # fmt: skip


def _require_finisher(half: Bundle, target: Target) -> Finisher:
    finisher = target.finisher()
    portable = any(item.state == "portable" for item in half.manifest.executables)
    if finisher is None and portable and (left := half.manifest.options.get("remaining")):
        raise InputError(f"{half.path}: cannot be finished from its own files: {left}")
    if finisher is None or all(item.state == "native" for item in half.manifest.executables):
        raise InputError(f"{half.path}: nothing to finish: its executables are final for {half.manifest.device}")
    if half.manifest.is_unbound:
        raise InputError(
            f"{half.path}: compiled from a configuration alone, so it cannot be run and compared; finish a "
            "bundle that was compiled from the checkpoint: MODEL in place of --config"
        )
    if lacks := finisher.lacks():
        raise DeviceError(f"{half.path}: cannot be finished here: {lacks}")
    return finisher


def _components(finisher: Finisher, target: str, pins: Mapping[str, Value]) -> dict[str, Value]:
    return {
        **{f"host.{name}": value for name, value in finisher.host().items()},
        **{f"option.{name}": value for name, value in pins.items()},
        "target": target,
        "state": "native",
    }


def executable_key(
    finisher: EachExecutable, half: Bundle, executable: Executable, pins: Mapping[str, Value]
) -> Key:  # fmt: skip
    """Key of one finished executable, in named components."""
    found = half.manifest
    return Key(
        "finished",
        {
            **_components(finisher, found.target, pins),
            "portable": executable.blob,
            **{f"file.{name}": found.files[name] for name in finisher.reads if name in found.files},
            **{f"shape.{name}": getattr(executable, name) for name in ("phase", "batch", "query", "context")},
            "code": code_digest(finisher.finish),
        },
    )


def _each(
    finisher: EachExecutable, half: Bundle, pins: Mapping[str, Value], store: Store, jobs: int, report: Reporter
) -> tuple[dict[Executable, Entry], int]:  # fmt: skip
    """Every executable's entry, and the number of cached ones; an error or an interrupt keeps the finished ones."""
    executables = half.manifest.executables

    def one(executable: Executable) -> tuple[Entry, bool, float]:
        began = time.perf_counter()

        def make(workspace: Workspace) -> Mapping[str, Blob]:
            at = time.perf_counter()
            data = finisher.finish(half, executable)
            workspace.meta |= {"state": "native", "seconds": round(time.perf_counter() - at, 3)}
            return {"executable": workspace.put_bytes(data)}

        entry, hit = store.get_or_build(executable_key(finisher, half, executable, pins), make)
        return entry, hit, time.perf_counter() - began

    created: dict[Executable, Entry] = {}
    hits = 0
    with ThreadPoolExecutor(jobs, thread_name_prefix="llmc-finish") as threads:
        futures = {threads.submit(one, item): item for item in executables}
        try:
            for future in as_completed(futures):
                entry, hit, seconds = future.result()
                item = futures[future]
                created[item], hits = entry, hits + hit
                size = entry.outputs["executable"].size
                report(ExecutableReport(len(created), len(executables), _shape(item), hit, seconds, size, "native"))
        except BaseException:
            threads.shutdown(wait=True, cancel_futures=True)
            raise
    return created, hits


def _programs(
    finisher: EachExecutable, half: Bundle, pins: Mapping[str, Value], store: Store, jobs: int
) -> dict[str, Blob]:  # fmt: skip
    def one(name: str) -> Blob:
        def make(workspace: Workspace) -> Mapping[str, Blob]:
            workspace.meta |= {"state": "native"}
            return {"program": workspace.put_bytes(finisher.finish_program(half, name))}

        components = {
            **_components(finisher, half.manifest.target, pins),
            "portable": half.manifest.files[name],
            "program": name,
            "code": code_digest(finisher.finish_program),
        }
        return store.get_or_build(Key("finished", components), make)[0].outputs["program"]

    with ThreadPoolExecutor(jobs, thread_name_prefix="llmc-finish") as threads:
        return dict(zip(finisher.programs, threads.map(one, finisher.programs), strict=True))


def _whole(
    finisher: WholeBundle, half: Bundle, pins: Mapping[str, Value], store: Store, report: Reporter
) -> tuple[Entry, bool]:  # fmt: skip
    """The entry of the device's output files, and whether it was cached."""
    executables = half.manifest.executables
    key = Key(
        "finished",
        {
            **_components(finisher, half.manifest.target, pins),
            "portable": half.manifest.digest,
            "code": code_digest(finisher.finish),
        },
    )

    def make(workspace: Workspace) -> Mapping[str, Blob]:
        began, done = time.perf_counter(), 0

        def reported(item: Executable) -> None:
            nonlocal began, done
            now, done = time.perf_counter(), done + 1
            report(ExecutableReport(done, len(executables), _shape(item), False, now - began, 0, "native"))
            began = now

        folder = workspace.folder / "run"
        folder.mkdir()
        found = finisher.finish(half, pins, folder, reported)
        workspace.meta |= {"state": "native"}
        return {name: workspace.put_file(path) for name, path in found.items()}

    return store.get_or_build(key, make)


def _shape(item: Executable) -> Shape:
    return Shape(item.phase, item.batch, item.query, item.context, item.buckets)


def _assemble(
    half: Bundle, finisher: Finisher, pins: Mapping[str, Value], created: Mapping[Executable, Entry],
    files: Mapping[str, Blob], store: Store,
) -> tuple[Manifest, dict[str, Path]]:  # fmt: skip
    """The finished manifest, and the file of each blob that it names."""
    old = half.manifest
    added = {name: blob for name, blob in files.items() if not is_digest(name)}
    added[PORTABLE_NAME] = store.put_bytes(old.to_bytes())
    blobs = [*files.values(), added[PORTABLE_NAME], *(entry.outputs["executable"] for entry in created.values())]
    executables: list[dict[str, Any]] = []
    for item in old.executables:
        changes: dict[str, Any] = {"state": "native"}
        if item in created:
            changes |= {"blob": created[item].outputs["executable"].digest, "key": created[item].key.digest}
        executables.append({**item._asdict(), **changes})
    provenance = {**old.provenance, "finished": {"manifest": old.digest, "llmc": __version__}}
    manifest = old.changed(
        executor=finisher.executor, executables=executables,
        files=dict(old.files) | {name: blob.digest for name, blob in added.items()},
        blobs=dict(old.blobs) | {blob.digest: blob.size for blob in blobs},
        options={**old.options, "remaining": "", **pins, FINISHED_FOR: dict(finisher.host())}, provenance=provenance,
    )  # fmt: skip
    sources = {digest: half.files.path(digest) for digest in old.blobs}
    return manifest, sources | {blob.digest: store.path(blob) for blob in blobs}
