"""Run natively compiled executables against the portable ones that they were built from, before they are published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.artifacts.key import LOCAL, Key, Value
from llmc.compiler.code import code_digest
from llmc.compiler.pipeline.compile import Reporter, VerifyReport
from llmc.compiler.stages import filled_folder
from llmc.compiler.targets.costs import DTYPE_BITS
from llmc.compiler.verification.parts import Once, bucket_of, choose, steps_beyond
from llmc.compiler.verification.verify import summarise
from llmc.errors import VerificationError
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors import executor_module, open_executor
from llmc.runtime.host import host_features

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Manifest
    from llmc.artifacts.digest import Blob
    from llmc.artifacts.store.store import Store
    from llmc.artifacts.store.workspace import Workspace
    from llmc.buckets.bucket import Bucket
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.targets.base import Target
    from llmc.compiler.targets.on_target import OnTargetCompiler

REFERENCE = "its portable executables"


def agree(
    half: Bundle, manifest: Manifest, sources: Mapping[str, Path], on_target: OnTargetCompiler, target: Target,
    options: CompileOptions, store: Store, report: Reporter,
) -> dict[str, Any]:  # fmt: skip
    """Compare the bundle of `manifest`, compiled on the target, with its portable half, and return the manifest entry;
    cached in the store.

    Raises VerificationError beyond the limits of the bundle's formats.
    """
    if options.verify == "none":
        return {"mode": "none"}
    plan, limits = half.plan, target.verification.limits(options)
    weights = manifest.files.get("weights")
    parameters = (manifest.blobs[weights] if weights else 0) * 8 // DTYPE_BITS[options.dtype]
    chosen = choose(
        plan.buckets, plan.limits, options.verify == "all", target.verification, manifest.executables, parameters
    )
    parts = [part for part in chosen.parts if not isinstance(part, str)]
    beyond = steps_beyond(plan.limits, parameters)
    components: dict[str, Value] = {
        "portable": half.manifest.digest,
        "on_target": manifest.digest,
        "mode": options.verify,
        **{f"host.{name}": value for name, value in on_target.host().items()},
        "isa": " ".join(host_features()),
        "code": code_digest(_outcomes, executor_module(on_target.executor), executor_module(half.manifest.executor)),
    }

    def make(workspace: Workspace) -> Mapping[str, Blob]:
        outcomes = _outcomes(half, manifest, sources, parts, beyond, store, report)
        try:
            workspace.meta["found"] = summarise(outcomes, limits).to_json()
        except VerificationError as error:
            raise VerificationError(
                f"{half.path}: compiled on the target, with {REFERENCE} as the reference model: {error}"
            ) from error
        return {}

    entry, _ = store.get_or_build(Key(f"{LOCAL}agreement", components), make)
    return {
        "mode": options.verify, "reference": REFERENCE, "limits": asdict(limits), **entry.meta["found"],
        **chosen.to_json(),
    }  # fmt: skip


def _outcomes(
    half: Bundle, manifest: Manifest, sources: Mapping[str, Path],
    parts: Sequence[Bucket | Once], beyond: int, store: Store, report: Reporter,
) -> list[dict[str, Any]]:  # fmt: skip
    from llmc.artifacts.bundle.reader import BundleFiles
    from llmc.artifacts.bundle.writer import write_bundle
    from llmc.compiler.verification.verify import Agreement

    def write(folder: Path) -> Path:
        return write_bundle(folder / "draft", manifest, sources)

    outcomes = []
    with filled_folder(store, "drafts", write) as draft:
        finished = Bundle(BundleFiles.open(draft), half.settings)
        executor = open_executor(finished)
        try:
            portable = open_executor(Bundle(half.files, replace(half.settings, open_portable=True)))
            try:
                agreement = Agreement(finished, executor, half, portable, beyond)
                for done, part in enumerate(parts, 1):
                    outcomes.append(agreement.bucket(bucket_of(part), runs=1 if isinstance(part, Once) else 2))
                    report(VerifyReport(done, len(parts)))
            finally:
                portable.close()
        finally:
            executor.close()
    return outcomes
