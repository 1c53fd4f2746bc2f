"""Verify a bundle whose device returns tokens and no logits: its greedy texts, token by token, against the reference.

Up to the first different token, text and reference have the same past, and each token is compared with the reference's
logits there. Tokens after a difference are not compared.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc.compiler.stages import StageReport
from llmc.compiler.verification.accuracy import least_equal, tied
from llmc.compiler.verification.probes import load_probes
from llmc.errors import DeviceError, VerificationError
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.executors import executor_class
from llmc.runtime.executors.generating import GeneratingExecutor
from llmc.runtime.startup.opening import EngineOptions, open_core, open_executor

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Manifest
    from llmc.artifacts.store.entries import Entry
    from llmc.compiler.stages import Stages
    from llmc.compiler.verification.limits import AccuracyLimits
    from llmc.compiler.verification.probes import Probe
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.engine.core import EngineCore


@dataclass(frozen=True)
class TokenResult:
    """Outcome: `rows` tokens were compared, with top-1 agreement `top1`; ties count as equal.

    `greedy_equal` of `greedy_sequences` texts are equal to their ends. `longest` is the most tokens of a prompt with
    its text.
    """

    rows: int
    top1: float
    greedy_sequences: int
    greedy_equal: int
    longest: int

    def to_json(self) -> dict[str, Any]:
        """The outcome for the manifest; `by` says that no logits were compared."""
        return {"by": "tokens", **asdict(self)}


def verify_tokens(engine: EngineCore, probes: Sequence[Probe], limits: AccuracyLimits) -> TokenResult:
    """Generate the short probes greedily and compare. Raises VerificationError, with numbers, beyond `limits`."""
    short = [p for p in probes[:-1] if p.continuation and p.prompt_length <= engine.plan.limits.longest_prompt]
    prompts = [p.tokens[: p.prompt_length].tolist() for p in short]
    greedy = [
        SamplingParams(max_tokens=len(p.continuation), temperature=0, top_p=1.0, top_k=0, repetition_penalty=1.0)
        for p in short
    ]
    built = engine.complete(prompts, greedy)
    rows = right = same = 0
    first_wrong = ""
    for number, (probe, tokens) in enumerate(zip(short, built, strict=True), 1):
        for at, (got, wanted) in enumerate(zip(tokens, probe.continuation, strict=False)):
            rows += 1
            good = got == wanted or tied(probe.logits[at], got)
            right += good
            if not good and not first_wrong:
                first_wrong = (
                    f"greedy token {at + 1} of probe prompt {number} is {got}, the reference model's is {wanted}"
                )
            if got != wanted:
                break
        else:
            same += 1
    if not rows:
        raise VerificationError("the device gave no token for any probe prompt; run it with a prompt of your own")
    top1 = right / rows
    least = least_equal(limits.top1, rows)
    if top1 < least:
        raise VerificationError(
            f"the device's tokens disagree with the reference model: {top1:.1%} of {rows} are equal (limit "
            f"{least:.0%}); {first_wrong}"
        )
    longest = max(len(prompt) + len(tokens) for prompt, tokens in zip(prompts, built, strict=True))
    return TokenResult(rows, top1, len(short), same, longest)


def gives_tokens(manifest: Manifest) -> bool:
    """Whether the manifest's device returns only tokens."""
    return issubclass(executor_class(manifest.executor), GeneratingExecutor)


def tokens_stage(
    bundle: Bundle, stages: Stages, reference: str, probes: Entry, limits: AccuracyLimits
) -> dict[str, Any]:
    """Verify the bundle, and return the manifest record without the mode; it runs each time, within seconds.

    `reference` names the reference. Raises VerificationError, and DeviceError without the device.
    """
    stages.report(StageReport("verify", False, None))
    start = time.perf_counter()
    with np.load(stages.path(probes.outputs["probes"])) as arrays:
        loaded = load_probes(arrays)
    options = EngineOptions()
    try:
        executor = open_executor(bundle, options)
    except DeviceError as error:
        raise DeviceError(f"{error}; --verify none compiles without running anything") from error
    try:
        found = verify_tokens(open_core(bundle, executor, options), loaded, limits)
    finally:
        executor.close()
    stages.report(StageReport("verify", False, time.perf_counter() - start))
    return {"reference": reference, "limits": asdict(limits), **found.to_json()}
