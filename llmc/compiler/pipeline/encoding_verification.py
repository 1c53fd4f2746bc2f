"""Verify a bundle that embeds or scores: during its compile, cached in the store, and again on request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.artifacts.bundle.writer import write_bundle
from llmc.artifacts.key import Key
from llmc.compiler.code import code_digest
from llmc.compiler.pipeline.compile import Reporter, VerifyReport
from llmc.compiler.stages import Stages, filled_folder, toolchain
from llmc.compiler.targets.encoder import EncoderCase, EncoderTarget, encoder_target
from llmc.runtime.executors.encoders import encoder_class, open_encoder
from llmc.runtime.host import host_features

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Manifest
    from llmc.artifacts.digest import Blob
    from llmc.artifacts.store.workspace import Workspace
    from llmc.buckets.encoding import EncodePlan
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.verification.encoding import EncodingOutcome
    from llmc.runtime.bundle import Bundle


def verification_of(
    stages: Stages, target: EncoderTarget, manifest: Manifest, sources: Mapping[str, Path], plan: EncodePlan,
    case: EncoderCase, options: CompileOptions, report: Reporter,
) -> dict[str, Any]:  # fmt: skip
    """Agreement of the bundle with the reference, cached in the store. Raises VerificationError."""
    if options.verify == "none":
        return {"mode": "none"}
    quality = _quality(manifest)
    components = {
        "encoder": manifest.executor, "executables": " ".join(sorted(e.blob for e in manifest.executables)),
        **{f"file.{name}": digest for name, digest in manifest.files.items()},
        "plan": plan.digest(), "mode": options.verify, "quality": quality, "isa": " ".join(host_features()),
        **stages.reading(), **toolchain(*target.reference_packages),
        **{f"toolchain.{package}": version for package, version in manifest.toolchain.items()},
        "code": code_digest(verification_of, target.reference, encoder_class(manifest.executor)),
    }  # fmt: skip

    def make(workspace: Workspace) -> Mapping[str, Blob]:
        from llmc.artifacts.bundle.reader import BundleFiles
        from llmc.runtime.bundle import Bundle

        with filled_folder(stages.store, "drafts", lambda f: write_bundle(f / "draft", manifest, sources)) as draft:
            bundle = Bundle(BundleFiles.open(draft), stages.settings)
            outcome = _run(
                bundle,
                stages,
                target,
                case,
                options.verify == "all",
                lambda done, total: report(VerifyReport(done, total)),
            )
        workspace.meta["outcome"] = outcome.to_json()
        return {}

    entry, _ = stages.store.get_or_build(Key("verify", components), make)
    return {"mode": options.verify, "reference": target.reference_name, "quality": quality, **entry.meta["outcome"]}


def verified_again(
    bundle: Bundle, stages: Stages, every: bool, progress: Callable[[int, int], None]
) -> dict[str, Any]:  # fmt: skip
    """Verify an existing bundle now, and take nothing from the store. Raises VerificationError."""
    case = EncoderCase.of(stages.checkpoint, bundle.encode_plan.task)  # type: ignore[arg-type] # what a plan to encode has
    target = encoder_target(bundle.manifest.target)
    outcome = _run(bundle, stages, target, case, every, progress)
    return {"reference": target.reference_name, "quality": _quality(bundle.manifest), **outcome.to_json()}


def _run(
    bundle: Bundle, stages: Stages, target: EncoderTarget, case: EncoderCase, every: bool,
    progress: Callable[[int, int], None],
) -> EncodingOutcome:  # fmt: skip
    from llmc.compiler.verification.encoding import verify_encoder

    reference = target.reference(stages.checkpoint, case)
    encoder = open_encoder(bundle)
    try:
        return verify_encoder(
            encoder, reference, bundle.encode_plan, int(stages.checkpoint.config["vocab_size"]),
            _quality(bundle.manifest), every, progress,
        )  # fmt: skip
    finally:
        encoder.close()


def _quality(manifest: Manifest) -> str:
    if manifest.options["quantize"] == "int8":
        return "int8"
    return "bf16" if manifest.options["dtype"] == "bf16" else "exact"
