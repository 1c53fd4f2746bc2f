"""Verification as cached stages of a compile, over a draft of the bundle.

Each bucket's outcome is kept under the digests of its executable, the shared files and the reference, so that a plan
that grew by a bucket verifies that bucket only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.artifacts.key import Key
from llmc.compiler.options import CompileOptions
from llmc.compiler.stages import StageReport, Stages, code_digest, filled_folder, version_of
from llmc.compiler.targets.base import Target

if TYPE_CHECKING:
    from llmc.artifacts.blobs import Blob
    from llmc.artifacts.entries import Entry
    from llmc.artifacts.manifest import Manifest
    from llmc.artifacts.workspace import Workspace
    from llmc.buckets.bucket import Bucket
    from llmc.buckets.plan import Plan
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.verification.probes import Probe, Reference
    from llmc.runtime.bundle import Bundle

SAMPLES = 4
_CODE = ("llmc.compiler.verification", "llmc.runtime")


def sample_buckets(plan: Plan, every: bool) -> list[Bucket]:
    """All buckets, or of each phase the smallest, the largest and SAMPLES − 2 others.

    The others are those whose name's digest is lowest: a choice that one more bucket in the plan hardly changes.
    """
    from llmc.artifacts.digest import digest_bytes

    if every:
        return list(plan.buckets)
    chosen: list[Bucket] = []
    for phase in (plan.prompt, plan.decode):
        order = sorted(phase, key=lambda b: (b.tokens * (1 + b.context), b))
        between = sorted(order[1:-1], key=lambda b: digest_bytes(str(b).encode()))[: SAMPLES - 2]
        chosen += dict.fromkeys([order[0], *between, order[-1]])
    return chosen


def open_reference(name: str, checkpoint: Checkpoint) -> Reference:
    """The reference implementation a target names."""
    if name == "toy":
        from llmc.compiler.verification.toy_reference import ToyReference

        return ToyReference(checkpoint)
    from llmc.compiler.verification.transformers_reference import TransformersReference

    return TransformersReference(checkpoint)


def probes_stage(stages: Stages, target: Target) -> Entry:
    """The probes with the reference's logits; needs the reference model only when they are not in the store."""
    longest = stages.plan.limits.longest_prompt + 1
    components: dict[str, Any] = {
        "reference": target.reference,
        "checkpoint": stages.checkpoint_digest(),
        "longest": longest,
        "code": code_digest("llmc.compiler.verification.probes"),
    }
    if target.reference == "transformers":
        components |= {f"toolchain.{p}": version_of(p) for p in ("torch", "transformers")}

    def build(workspace: Workspace) -> Mapping[str, Blob]:
        from llmc.compiler.verification.probes import make_probes, save_probes

        reference = open_reference(target.reference, stages.checkpoint)
        vocab_size = int(stages.checkpoint.config["vocab_size"])
        probes = make_probes(stages.checkpoint, reference, longest, vocab_size)
        return {"probes": workspace.put_bytes(save_probes(probes))}

    return stages.run("reference", components, build)


def verify_stage(
    stages: Stages, target: Target, manifest: Manifest, sources: Mapping[str, Path], options: CompileOptions,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:  # fmt: skip
    """Verify what of the bundle was not verified before; returns what the manifest records.

    Raises VerificationError, and records nothing for what failed.
    """
    from llmc.compiler.verification.verify import summarise

    probes = probes_stage(stages, target)
    limits = target.limits(options)
    buckets = sample_buckets(stages.plan, every=options.verify == "all")
    keys: list[tuple[Bucket | None, Key]] = [(None, _key(stages, target, manifest, probes, None))]
    keys += [(b, _key(stages, target, manifest, probes, b)) for b in buckets]
    outcomes = {key.digest: entry.meta for _, key in keys if (entry := stages.store.lookup(key)) is not None}
    missing = [(bucket, key) for bucket, key in keys if key.digest not in outcomes]
    stages.report(StageReport("verify", False, None))
    start = time.perf_counter()
    if missing:
        made = _run(stages, manifest, sources, probes, [b for b, _ in missing], progress)
        for (_, key), outcome in zip(missing, made, strict=True):
            outcomes[key.digest] = outcome
    result = summarise([outcomes[key.digest] for _, key in keys], limits)
    for _, key in missing:
        stages.store.get_or_build(key, _recorder(outcomes[key.digest]))
    stages.report(StageReport("verify", not missing, time.perf_counter() - start))
    return {
        "mode": options.verify,
        "reference": target.reference,
        "limits": asdict(limits),
        **result.to_json(),
    }


def _key(stages: Stages, target: Target, manifest: Manifest, probes: Entry, bucket: Bucket | None) -> Key:
    """Key of one bucket's outcome, or of greedy generation over the whole bundle."""
    if bucket is None:
        graphs = sorted(e.key for e in manifest.executables)
    else:
        batch, query, context = target.shape_of(bucket)
        graphs = [
            e.key for e in manifest.executables
            if e.phase in ("any", bucket.phase) and e.batch in (None, batch) and e.query in (None, query)
            and e.context in (None, context)
        ]  # fmt: skip
    return Key(
        "verify",
        {
            "bucket": str(bucket or "greedy"),
            "executables": " ".join(graphs),
            "plan": stages.plan.digest() if bucket is None else "",
            **{f"file.{name}": digest for name, digest in manifest.files.items()},
            "reference": probes.key.digest,
            "code": code_digest(*_CODE),
        },
    )


def _recorder(outcome: Mapping[str, Any]) -> Callable[[Workspace], Mapping[str, Blob]]:
    def build(workspace: Workspace) -> Mapping[str, Blob]:
        workspace.meta |= outcome
        return {}

    return build


def _run(
    stages: Stages, manifest: Manifest, sources: Mapping[str, Path], probes: Entry,
    parts: Sequence[Bucket | None], progress: Callable[[int, int], None],
) -> list[dict[str, Any]]:  # fmt: skip
    from llmc.artifacts.bundle_writer import write_bundle
    from llmc.runtime.bundle import Bundle

    def write(folder: Path) -> Path:
        return write_bundle(folder / "draft", manifest, sources)

    with filled_folder(stages.store, "drafts", write) as draft:
        return run_parts(Bundle.open(draft), stages, probes, parts, progress)


def run_parts(
    bundle: Bundle,
    stages: Stages,
    probes: Entry,
    parts: Sequence[Bucket | None],
    progress: Callable[[int, int], None],
) -> list[dict[str, Any]]:
    """The outcome of each bucket of an opened bundle; None stands for greedy generation."""
    from llmc.compiler.verification.verify import Verification

    executor = bundle.executor()
    try:
        verification = Verification(bundle, executor, _load(stages, probes))
        outcomes = []
        for done, part in enumerate(parts, 1):
            outcomes.append(verification.greedy() if part is None else verification.bucket(part))
            progress(done, len(parts))
        return outcomes
    finally:
        executor.close()


def _load(stages: Stages, probes: Entry) -> list[Probe]:
    import numpy as np

    from llmc.compiler.verification.probes import load_probes

    with np.load(stages.path(probes.outputs["probes"])) as arrays:
        return load_probes(arrays)
