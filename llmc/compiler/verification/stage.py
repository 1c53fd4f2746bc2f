"""Verification as a cached stage of a compile, over a draft of the bundle."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.compiler.options import CompileOptions
from llmc.compiler.stages import Stages, code_digest, version_of
from llmc.compiler.targets.base import Target

if TYPE_CHECKING:
    from llmc.artifacts.blobs import Blob
    from llmc.artifacts.entries import Entry
    from llmc.artifacts.manifest import Manifest
    from llmc.artifacts.workspace import Workspace
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.verification.probes import Reference

_CODE = ("llmc.compiler.verification", "llmc.runtime")


def open_reference(name: str, checkpoint: Checkpoint) -> Reference:
    """The reference implementation a target names."""
    if name == "toy":
        from llmc.compiler.verification.toy_reference import ToyReference

        return ToyReference(checkpoint)
    from llmc.compiler.verification.transformers_reference import TransformersReference

    return TransformersReference(checkpoint)


def probes_stage(stages: Stages, target: Target) -> Entry:
    """The probes with the reference's logits; needs the reference model only when they are not in the store."""
    longest = min(stages.plan.limits.longest_prompt + 1, stages.plan.limits.max_model_len)
    components = {
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
        return {"probes": workspace.put_bytes(save_probes(make_probes(stages.checkpoint, reference, longest, vocab_size)))}

    return stages.run("reference", components, build)


def verify_stage(
    stages: Stages, target: Target, manifest: Manifest, sources: Mapping[str, Path], options: CompileOptions,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:  # fmt: skip
    """Verify the bundle that `manifest` describes, unless this very bundle was verified before.

    Returns what the manifest records; raises VerificationError.
    """
    probes = probes_stage(stages, target)
    limits = target.limits(options)
    components = {
        "bundle": manifest.digest,
        "reference": probes.key.digest,
        "mode": options.verify,
        **{f"limit.{k}": str(v) for k, v in asdict(limits).items()},
        "code": code_digest(*_CODE),
    }

    def build(workspace: Workspace) -> Mapping[str, Blob]:
        import numpy as np

        from llmc.artifacts.bundle_writer import write_bundle
        from llmc.compiler.verification.probes import load_probes
        from llmc.compiler.verification.verify import sample_buckets, verify_bundle
        from llmc.runtime.bundle import Bundle

        bundle = Bundle.open(write_bundle(workspace.folder / "draft", manifest, sources))
        buckets = sample_buckets(stages.plan, every=options.verify == "all")
        with np.load(stages.path(probes.outputs["probes"])) as arrays:
            result = verify_bundle(bundle, load_probes(arrays), buckets, limits, progress=progress)
        record = {
            "mode": options.verify, "reference": target.reference, "limits": asdict(limits), **result.to_json()
        }  # fmt: skip
        return {"result": workspace.put_bytes(json.dumps(record, sort_keys=True).encode())}

    entry = stages.run("verify", components, build)
    record: dict[str, Any] = json.loads(stages.store.get_bytes(entry.outputs["result"].digest))
    return record


