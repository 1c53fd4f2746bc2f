"""Verify an existing bundle against the checkpoint it came from, or another copy of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmc.artifacts.local.origins import HERE, Origin, remember, verification_origin
from llmc.artifacts.store.store import Store
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.pipeline.encoding_verification import verified_again
from llmc.compiler.pipeline.provenance import find_model
from llmc.compiler.pipeline.resolve import recorded_options, target_of
from llmc.compiler.pipeline.verification import origins_of, run_parts, vouched_probes
from llmc.compiler.stages import OnStageReport, Stages
from llmc.compiler.verification.parts import choose
from llmc.compiler.verification.tokens import gives_tokens, tokens_stage
from llmc.compiler.verification.verify import summarise
from llmc.errors import ArtifactError, CheckpointError
from llmc.runtime.bundle import Bundle


def verify_again(
    path: Path,
    reference: str | None,
    every: bool,
    store: Store,
    report: OnStageReport,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:
    """Check the files and numbers of the bundle at `path`, independent of earlier verifications.

    Only the reference's predictions are reused, if this machine computed them or a trusted key signed them. `recorded`
    in the result says where the outcome in the manifest comes from. The store records that this machine verified the
    bundle. Raises ArtifactError for damaged files, CheckpointError when the reference is missing or another model, and
    VerificationError when numbers disagree.
    """
    bundle = Bundle.open(path)
    bad = bundle.files.verify()
    if bad:
        raise ArtifactError(f"{path}: {'; '.join(bad)}; compile again: {bundle.recompile_hint}")
    manifest = bundle.manifest
    known = manifest.provenance
    model = reference or find_model(store, str(known.get("checkpoint", "")), str(known.get("model", "")))
    pooled = bundle.task != "generate"
    stages = Stages(store, open_checkpoint(model), bundle.encode_plan if pooled else bundle.plan, report)
    if stages.checkpoint_digest() != manifest.provenance.get("checkpoint"):
        raise CheckpointError(f"{model} is not the checkpoint that {path} was compiled from: its content differs")
    recorded = verification_origin(bundle.files, store, stages.settings)
    if pooled:
        found, origin = verified_again(bundle, stages, every, progress), HERE
    else:
        found, origin = _numbers(bundle, stages, every, progress)
    remember(store, manifest, origin)
    return {**found, "recorded": {"origin": recorded.name, "signers": list(recorded.signers)}}


def _numbers(
    bundle: Bundle, stages: Stages, every: bool, progress: Callable[[int, int], None]
) -> tuple[dict[str, Any], Origin]:
    """The outcome of a bundle that generates, and the origin of the reference's predictions."""
    manifest = bundle.manifest
    target = target_of(manifest)
    limits = target.verification.limits(recorded_options(manifest, target))
    probes, origin = vouched_probes(stages, target, origins_of(stages), anew=True)
    if gives_tokens(manifest):
        found = tokens_stage(bundle, stages, target.description.reference.name, probes, limits)
    else:
        plan = bundle.plan
        chosen = choose(plan.buckets, plan.limits, every, target.verification, manifest.executables, stages.parameters)
        result = summarise(run_parts(bundle, stages, probes, chosen.parts, progress), limits)
        found = {
            "reference": target.description.reference.name, "limits": vars(limits),
            **result.to_json(), **chosen.to_json(),
        }  # fmt: skip
    return found, origin
