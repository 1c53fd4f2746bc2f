"""Compile a portable bundle natively on its device's own host, from the bundle's own blobs; verify and publish it.

No checkpoint is needed. Each result is a cached stage of the store: an interrupted run resumes, and of two concurrent
runs one builds and the other waits. The new bundle replaces the portable one atomically:

    executables  the native ones
    files        the old ones, the device's outputs, and "portable.json": the manifest of the portable bundle
    options      the old ones, the pinned ones, and "built_for": {name: value}, what the executables are tied to
    verification the old one, and "on_target": how they agree with the portable executables
    provenance   the old one, and "on_target": {"manifest": digest of the portable manifest, "llmc": version}

All blobs of the portable bundle stay, which lets any host run it or compile it natively again. A signature covers one
manifest: that of the portable bundle does not cover the new one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.artifacts.bundle.manifest import BUILT_FOR, FILE_NAME, PORTABLE_NAME, Executable, Manifest, read_manifest
from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.bundle.stored import remember_bundle
from llmc.artifacts.bundle.writer import check_replaceable, write_bundle
from llmc.artifacts.digest import Blob, is_digest
from llmc.artifacts.key import Key, Value
from llmc.compiler.code import code_digest
from llmc.compiler.pipeline.agree import agree
from llmc.compiler.pipeline.compile import BeginReport, CompileResult, ExecutableReport, Reporter, compile_job, dry_run
from llmc.compiler.pipeline.journal import Journal
from llmc.compiler.pipeline.resolve import CompileJob, recorded_options, target_of
from llmc.compiler.targets.base import Shape, Target
from llmc.compiler.targets.on_target import EachExecutable, OnTargetCompiler, WholeBundle
from llmc.errors import CompileError, DeviceError, InputError
from llmc.files import write_texts
from llmc.paths import is_dir
from llmc.runtime.bundle import Bundle
from llmc.settings import Settings
from llmc.version import __version__

if TYPE_CHECKING:
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.store import Store
    from llmc.artifacts.store.workspace import Workspace


@dataclass(frozen=True)
class OnTargetResult:
    """Outcome of on-target compilation; sizes in bytes, times in seconds.

    `built_for` is what the executables are tied to, `files` are the device's outputs, and `unsigned` says whether
    the bundle lost a signature.
    """

    bundle: str
    device: str
    built_for: dict[str, str]
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


def compile_fully(job: CompileJob, destination: Path, store: Store, report: Reporter) -> CompileResult:
    """Run `compile_job`, and on the device's own host `compile_on_target` on its portable executables."""
    report(BeginReport(lambda: float(dry_run(job, store)["estimated_seconds"])))
    result = compile_job(job, destination, store, report)
    manifest = read_manifest(destination)
    if not result.portable or manifest.is_unbound or on_target_here(job.target) is None:
        return result
    options = job.options
    done = compile_on_target(
        destination, store, report, jobs=options.jobs, verify=options.verify, settings=job.target.settings,
        target=job.target,
    )  # fmt: skip
    return replace(
        result, portable=done.portable, native=done.native, seconds=round(result.seconds + done.seconds, 3),
        bytes=done.bytes, remaining="", on_target=done.to_json(),
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
    on_target = target.on_target()
    texts = {} if on_target is None else on_target.host_files(bundle, opened.plan)
    names = write_texts(folder, texts, "files for the device's host") if texts else []
    return replace(result, host_files=[str(folder / name) for name in names])


def on_target_here(target: Target) -> OnTargetCompiler | None:
    """The target's finisher for this host; None where nothing is portable, or this is not the device's host."""
    on_target = target.on_target()
    return None if on_target is None or on_target.lacks() else on_target


def can_compile_on_target(folder: Path) -> bool:
    """Whether a folder is a bundle with executables that are portable or were compiled on the target, and has no
    interrupted compile."""
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
    wanted = bundle.manifest.options.get(BUILT_FOR)
    on_target = None if wanted is None else on_target_here(target_of(bundle.manifest))
    return "compiled for another host" if on_target is not None and on_target.host() != wanted else ""


def compile_on_target(
    path: Path, store: Store, report: Reporter, *, jobs: int = 1, verify: str = "sample",
    settings: Settings | None = None, target: Target | None = None,
) -> OnTargetResult:  # fmt: skip
    """Compile the bundle in the folder `path` natively for this host, in place; one that is already compiled for it
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
    on_target = _require_on_target(half, target)
    check_replaceable(Path(os.path.realpath(path)))
    pins = on_target.pins(half)
    if isinstance(on_target, EachExecutable):
        created, reused = _each(on_target, half, pins, store, jobs, report)
        files: Mapping[str, Blob] = _programs(on_target, half, pins, store, jobs)
    elif isinstance(on_target, WholeBundle):
        entry, hit = _whole(on_target, half, pins, store, report)
        created, files, reused = {}, entry.outputs, len(half.manifest.executables) * hit
    else:
        raise CompileError(
            f"device {target.description.name}: {type(on_target).__name__} is neither an EachExecutable nor a "
            "WholeBundle"
        )
    manifest, sources = _assemble(half, on_target, pins, created, files, store)
    options = recorded_options(half.manifest, target).changed(verify=verify)
    outcome = agree(half, manifest, sources, on_target, target, options, store, report)
    final = manifest.changed(verification=dict(half.manifest.verification) | {"on_target": outcome})
    signed = bundle.files.signature is not None and final != bundle.manifest
    write_bundle(path, final, sources)
    remember_bundle(store, final)
    states = [item.state for item in final.executables]
    return OnTargetResult(
        bundle=str(path), device=final.device, built_for=dict(on_target.host()), built=len(states) - reused,
        reused=reused, portable=states.count("portable"), native=states.count("native"),
        files=[name for name in sorted(files) if not is_digest(name)],
        unsigned=signed, seconds=round(time.perf_counter() - began, 3), bytes=final.size, verification=outcome,
    )  # fmt: skip


def _require_on_target(half: Bundle, target: Target) -> OnTargetCompiler:
    on_target = target.on_target()
    portable = any(item.state == "portable" for item in half.manifest.executables)
    if on_target is None and portable and (left := half.manifest.options.get("remaining")):
        raise InputError(f"{half.path}: cannot be compiled on the target from its own files: {left}")
    if on_target is None or all(item.state == "native" for item in half.manifest.executables):
        raise InputError(
            f"{half.path}: nothing to compile on the target: its executables are final for {half.manifest.device}"
        )
    if half.manifest.is_unbound:
        raise InputError(
            f"{half.path}: compiled from a configuration alone, so it cannot be run and compared; use a "
            "bundle that was compiled from the checkpoint: MODEL in place of --config"
        )
    if lacks := on_target.lacks():
        raise DeviceError(f"{half.path}: cannot be compiled here: {lacks}")
    return on_target


def _components(on_target: OnTargetCompiler, target: str, pins: Mapping[str, Value]) -> dict[str, Value]:
    return {
        **{f"host.{name}": value for name, value in on_target.host().items()},
        **{f"option.{name}": value for name, value in pins.items()},
        "target": target,
        "state": "native",
    }


def executable_key(
    on_target: EachExecutable, half: Bundle, executable: Executable, pins: Mapping[str, Value]
) -> Key:  # fmt: skip
    """Key of one executable compiled on the target, in named components."""
    found = half.manifest
    return Key(
        "on-target",
        {
            **_components(on_target, found.target, pins),
            "portable": executable.blob,
            **{f"file.{name}": found.files[name] for name in on_target.reads if name in found.files},
            **{f"shape.{name}": getattr(executable, name) for name in ("phase", "batch", "query", "context")},
            "code": code_digest(on_target.compile),
        },
    )


def _each(
    on_target: EachExecutable, half: Bundle, pins: Mapping[str, Value], store: Store, jobs: int, report: Reporter
) -> tuple[dict[Executable, Entry], int]:  # fmt: skip
    """Every executable's entry, and the number of cached ones; an error or an interrupt keeps those done."""
    executables = half.manifest.executables

    def one(executable: Executable) -> tuple[Entry, bool, float]:
        began = time.perf_counter()

        def make(workspace: Workspace) -> Mapping[str, Blob]:
            at = time.perf_counter()
            data = on_target.compile(half, executable)
            workspace.meta |= {"state": "native", "seconds": round(time.perf_counter() - at, 3)}
            return {"executable": workspace.put_bytes(data)}

        entry, hit = store.get_or_build(executable_key(on_target, half, executable, pins), make)
        return entry, hit, time.perf_counter() - began

    created: dict[Executable, Entry] = {}
    hits = 0
    with ThreadPoolExecutor(jobs, thread_name_prefix="llmc-on-target") as threads:
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
    on_target: EachExecutable, half: Bundle, pins: Mapping[str, Value], store: Store, jobs: int
) -> dict[str, Blob]:  # fmt: skip
    def one(name: str) -> Blob:
        def make(workspace: Workspace) -> Mapping[str, Blob]:
            workspace.meta |= {"state": "native"}
            return {"program": workspace.put_bytes(on_target.compile_program(half, name))}

        components = {
            **_components(on_target, half.manifest.target, pins),
            "portable": half.manifest.files[name],
            "program": name,
            "code": code_digest(on_target.compile_program),
        }
        return store.get_or_build(Key("on-target", components), make)[0].outputs["program"]

    with ThreadPoolExecutor(jobs, thread_name_prefix="llmc-on-target") as threads:
        return dict(zip(on_target.programs, threads.map(one, on_target.programs), strict=True))


def _whole(
    on_target: WholeBundle, half: Bundle, pins: Mapping[str, Value], store: Store, report: Reporter
) -> tuple[Entry, bool]:  # fmt: skip
    executables = half.manifest.executables
    key = Key(
        "on-target",
        {
            **_components(on_target, half.manifest.target, pins),
            "portable": half.manifest.digest,
            "code": code_digest(on_target.compile),
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
        found = on_target.compile(half, pins, folder, reported)
        workspace.meta |= {"state": "native"}
        return {name: workspace.put_file(path) for name, path in found.items()}

    return store.get_or_build(key, make)


def _shape(item: Executable) -> Shape:
    return Shape(item.phase, item.batch, item.query, item.context, item.buckets)


def _assemble(
    half: Bundle, on_target: OnTargetCompiler, pins: Mapping[str, Value], created: Mapping[Executable, Entry],
    files: Mapping[str, Blob], store: Store,
) -> tuple[Manifest, dict[str, Path]]:  # fmt: skip
    """The new manifest, and the file of each blob that it names."""
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
    provenance = {**old.provenance, "on_target": {"manifest": old.digest, "llmc": __version__}}
    manifest = old.changed(
        executor=on_target.executor, executables=executables,
        files=dict(old.files) | {name: blob.digest for name, blob in added.items()},
        blobs=dict(old.blobs) | {blob.digest: blob.size for blob in blobs},
        options={**old.options, "remaining": "", **pins, BUILT_FOR: dict(on_target.host())}, provenance=provenance,
    )  # fmt: skip
    sources = {digest: half.files.path(digest) for digest in old.blobs}
    return manifest, sources | {blob.digest: store.path(blob) for blob in blobs}
