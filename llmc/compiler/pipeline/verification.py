"""Verification as cached stages of a compile, over a draft of the bundle.

Its parts are buckets (at least one per executable), greedy texts, and the accuracy over a text. The key of a bucket's
outcome has the digests of its executable, the shared files and the reference, the libraries and the instruction set. It
also has the digests of the executables that compute the continued past. For a plan with one more decode bucket, only
that bucket and the parts over the whole bundle run again.

Outcomes and the reference's predictions may come from elsewhere; the record says where (local/origins.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

from llmc.artifacts.atomic_write import UnwritableError
from llmc.artifacts.digest import Blob, digest_bytes
from llmc.artifacts.key import Key, Value, canonical_json
from llmc.artifacts.local.origins import HERE, Origin, Origins, elsewhere, joint, own_key
from llmc.artifacts.log import logger
from llmc.compiler.code import code_digest
from llmc.compiler.options import CompileOptions
from llmc.compiler.stages import StageReport, Stages, filled_folder, toolchain
from llmc.compiler.targets.base import Target
from llmc.compiler.verification.parts import (
    Once,
    ServingExecutables,
    VerifiedPart,
    bucket_of,
    choose,
    past_length,
    readable,
    steps_beyond,
)
from llmc.errors import ArtifactError, CapacityError, VerificationError
from llmc.runtime.executors import executor_module, open_executor
from llmc.runtime.heap import trim
from llmc.runtime.host import host_features

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Executable, Manifest
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.workspace import Workspace
    from llmc.buckets.bucket import Bucket
    from llmc.buckets.plan import Plan
    from llmc.compiler.verification.probes import Probe, TextWindow
    from llmc.runtime.bundle import Bundle

_WORDS = ("analysis", "choice", "remaining")
"""Manifest options that are text for people; executors may use any other option to open executables."""


def origins_of(stages: Stages) -> Origins:
    """Lookup for the origins of results in the store."""
    from llmc.artifacts.signing.keyring import Keyring

    return Origins(stages.store, Keyring.from_settings(stages.settings))


def vouched_probes(stages: Stages, target: Target, origins: Origins, *, anew: bool) -> tuple[Entry, Origin]:
    """`probes_stage` and the origin of its predictions; `anew` recomputes unsigned ones from elsewhere."""
    entry, origin = origins.of_entry(probes_stage(stages, target))
    if anew and origin.name == "unsigned":
        return probes_stage(stages, target, own=True), HERE
    return entry, origin


def probes_stage(stages: Stages, target: Target, *, own: bool = False) -> Entry:
    """Probes and text with the reference's predictions; runs the reference only when they are not in the store.

    They may come from elsewhere, unless the store's `own` are requested.
    """
    limits = stages.plan.limits
    longest = limits.longest_prompt + 1
    farthest = min(longest + steps_beyond(limits, stages.parameters), limits.max_model_len - 1)
    components: dict[str, Value] = {
        "reference": target.description.reference.name,
        **stages.reading(),
        "longest": longest,
        "farthest": farthest,
        **toolchain("numpy", "tokenizers"),
        "code": code_digest(probes_stage, type(stages.checkpoint), target.description.reference.module),
        **(
            toolchain(*target.description.reference.packages, python=True)
            if target.description.reference.packages
            else {}
        ),
    }

    def make(workspace: Workspace) -> Mapping[str, Blob]:
        from llmc.compiler.verification.probes import make_probes, make_windows, save_probes, save_windows

        vocab_size, probes = int(stages.checkpoint.config["vocab_size"]), []
        for number in range(
            len(stages.checkpoint.choices), -1, -1
        ):  # the base comes last, because the text is read with it
            checkpoint = stages.checkpoint.of_adapter(number)
            reference = target.description.reference.open(checkpoint)
            probes += make_probes(checkpoint, reference, longest, vocab_size, farthest, number)
        windows = make_windows(checkpoint, reference, longest, vocab_size)
        return {
            "probes": workspace.put_bytes(save_probes(probes)),
            "text": workspace.put_bytes(save_windows(windows)),
        }

    mine = own_key(Key("reference", components))
    if own:
        return stages.run(mine.kind, components, make)
    return stages.run("reference", components, lambda _: stages.store.get_or_build(mine, make)[0].outputs)


def verify_stage(
    stages: Stages, target: Target, manifest: Manifest, sources: Mapping[str, Path], options: CompileOptions,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:  # fmt: skip
    """Verify the parts of the bundle that are not verified yet, and return the record for the manifest.

    With LLMC_REQUIRE_SIGNATURES nothing unsigned from elsewhere counts as verified, even if it is in the store. Raises
    VerificationError, and records no failed part.
    """
    from llmc.compiler.verification.probes import shortened
    from llmc.compiler.verification.tokens import gives_tokens, tokens_stage
    from llmc.compiler.verification.verify import summarise

    settings = stages.settings
    origins = origins_of(stages)
    probes, predicted = vouched_probes(stages, target, origins, anew=settings.require_signatures)
    limits = target.verification.limits(options)
    if gives_tokens(manifest):
        with _draft(stages, manifest, sources, target) as draft:
            return {
                "mode": options.verify,
                **tokens_stage(draft, stages, target.description.reference.name, probes, limits),
            }
    every = options.verify == "all"
    chosen = choose(
        stages.plan.buckets, stages.plan.limits, every, target.verification, manifest.executables, stages.parameters
    )
    serving = ServingExecutables(target.verification, manifest.executables)
    keys = [(part, _key(stages, serving, manifest, probes, part)) for part in chosen.parts]
    outcomes: dict[str, Mapping[str, Any]] = {}
    found: dict[str, Origin] = {}
    for part, key in keys:
        if (known := stages.store.obtain(key)) is not None and readable(part, known.meta):
            entry, origin = origins.of_entry(known)
            if not (settings.require_signatures and origin.name == "unsigned"):
                outcomes[key.digest], found[key.digest] = entry.meta, origin
    missing = [(part, key) for part, key in keys if key.digest not in outcomes]
    stages.report(StageReport("verify", False, None))
    start = time.perf_counter()
    if missing:
        with _draft(stages, manifest, sources, target) as draft:
            built = run_parts(draft, stages, probes, [part for part, _ in missing], progress)
        for (_, key), outcome in zip(missing, built, strict=True):
            outcomes[key.digest] = outcome
    try:
        result = summarise([outcomes[key.digest] for _, key in keys], limits)
    except VerificationError as error:
        raise _located(error, stages, target) from error
    try:
        for _, key in missing:
            for one in (own_key(key), key):
                stages.store.publish(one, {}, outcomes[key.digest])
    except (CapacityError, UnwritableError) as error:
        logger().warning("the verification result is not saved: %s", error)
    stages.report(StageReport("verify", not missing, time.perf_counter() - start))
    return {
        "mode": options.verify,
        "reference": target.description.reference.name,
        "limits": asdict(limits),
        **result.to_json(),
        **chosen.to_json(),
        "shortened": shortened(stages.checkpoint),
        **elsewhere(joint([predicted, found.get(key.digest, HERE)]) for _, key in keys),
    }


def _located(error: VerificationError, stages: Stages, target: Target) -> VerificationError:
    """The same error, with the layer where the traced model first differs from its reference."""
    start = time.perf_counter()
    stages.report(StageReport("diagnose", False, None))
    try:
        where = target.description.reference.first_difference(stages.checkpoint, stages.plan.limits.max_model_len - 1)
    except Exception as reason:  # noqa: BLE001 - whatever a wrong model raises, the refusal is what counts
        where = f"the differing layer could not be found ({type(reason).__name__}: {reason!s:.200})"
    stages.report(StageReport("diagnose", False, time.perf_counter() - start))
    return VerificationError(f"{error}; {where}") if where else error


def _key(
    stages: Stages, serving: ServingExecutables[Executable], manifest: Manifest, probes: Entry, part: VerifiedPart
) -> Key:
    plan = stages.plan
    components: dict[str, Value] = {
        "bucket": str(part),
        **{f"file.{name}": digest for name, digest in manifest.files.items()},
        "reference": probes.outputs[_predictions(part)].digest,
        **{f"toolchain.{name}": version for name, version in manifest.toolchain.items()},
        **toolchain("numpy"),
        **{f"option.{n}": canonical_json(v).decode() for n, v in manifest.options.items() if n not in _WORDS},
        "isa": " ".join(host_features()),
        **{f"environment.{name}": value for name, value in stages.settings.kernel_limits.items()},
        "code": code_digest(run_parts, executor_module(manifest.executor)),
    }
    if isinstance(part, str):
        components["executables"] = _joint(manifest.executables)
        components["plan"] = _buckets_digest(plan, plan.buckets)
        return Key("verify", components)
    bucket = bucket_of(part)
    components["executables"] = _joint(serving.of(bucket))
    past = past_length(bucket, plan.limits, steps_beyond(plan.limits, stages.parameters))
    if past > plan.limits.longest_prompt:  # decode graphs compute its end
        components["past.executables"] = _joint(manifest.executables)
        components["past.plan"] = _buckets_digest(plan, plan.buckets)
    elif past:  # the bundle's own prefill graphs, as the plan selects them, compute the past
        components["past.executables"] = _joint([e for e in manifest.executables if e.phase in ("any", "prompt")])
        components["past.plan"] = _buckets_digest(plan, plan.prompt)
    return Key("verify", components)


def _joint(executables: Sequence[Executable]) -> str:
    """One digest for the contents of some executables, in any order: the verified ones are those served."""
    return digest_bytes(canonical_json(sorted(executable.blob for executable in executables)))


def _buckets_digest(plan: Plan, buckets: Sequence[Bucket]) -> str:
    """Digest of only limits and buckets: a plan also describes its origin, which no result depends on."""
    return digest_bytes(canonical_json([plan.limits.to_dict(), [str(bucket) for bucket in buckets]]))


@contextmanager
def _draft(stages: Stages, manifest: Manifest, sources: Mapping[str, Path], target: Target) -> Iterator[Bundle]:
    """The opened bundle as it would be published; on the CPU, where the target is verified there."""
    from llmc.artifacts.bundle.reader import BundleFiles
    from llmc.artifacts.bundle.writer import write_bundle
    from llmc.runtime.bundle import Bundle

    def write(folder: Path) -> Path:
        return write_bundle(folder / "draft", manifest, sources)

    with filled_folder(stages.store, "drafts", write) as draft:
        portable = stages.settings.open_portable or target.verification.portable
        yield Bundle(BundleFiles.open(draft), replace(stages.settings, open_portable=portable))


def run_parts(
    bundle: Bundle,
    stages: Stages,
    probes: Entry,
    parts: Sequence[VerifiedPart],
    progress: Callable[[int, int], None],
) -> list[dict[str, Any]]:
    """Run each part of an opened bundle, and return the outcomes."""
    from llmc.compiler.verification.probes import turns_of
    from llmc.compiler.verification.verify import Verification

    trim()  # release the reference's memory while the bundle runs
    executor = open_executor(bundle)
    try:
        if executor.capabilities.exact:
            executor.open_all()  # opened in the background, they would run or not depending on timing
        beyond, turns = steps_beyond(stages.plan.limits, stages.parameters), turns_of(stages.checkpoint.config)
        verification = Verification(bundle, executor, *_load(stages, probes, parts), beyond, turns)
        outcomes = []
        for done, part in enumerate(parts, 1):
            if part == "greedy":
                outcomes.append(verification.greedy())
            elif part == "accuracy":
                outcomes.append(verification.accuracy())
            elif isinstance(part, Once):
                outcomes.append(verification.bucket(part.bucket, runs=1))
            else:
                outcomes.append(verification.bucket(part))
            progress(done, len(parts))
        return outcomes
    finally:
        executor.close()


def _predictions(part: VerifiedPart) -> str:
    return "text" if part == "accuracy" else "probes"


def _load(stages: Stages, entry: Entry, parts: Sequence[VerifiedPart]) -> tuple[list[Probe], list[TextWindow]]:
    import numpy as np

    from llmc.compiler.verification.probes import load_probes, load_windows

    needed = {_predictions(part) for part in parts}
    try:
        with ExitStack() as stack:
            arrays = {name: stack.enter_context(np.load(stages.path(entry.outputs[name]))) for name in sorted(needed)}
            probes = load_probes(arrays["probes"]) if "probes" in needed else []
            if "probes" in needed and not probes:
                raise ValueError("there is no probe")
            return probes, load_windows(arrays["text"]) if "text" in needed else []
    except (AttributeError, EOFError, IndexError, KeyError, TypeError, ValueError, BadZipFile) as error:
        raise ArtifactError(
            f"the reference's predictions {entry.key.digest} have an unknown form ({error!r}); compile with "
            "LLMC_REQUIRE_SIGNATURES=1 to recompute unsigned ones"
        ) from error
