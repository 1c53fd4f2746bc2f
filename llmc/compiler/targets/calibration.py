"""Calibration of 4-bit weights, as a cached stage.

It calibrates quantized blocks over a text, and selects the matrices that stay in 8 bits to keep a divergence bound.
llmc's own calibration text is its passages (verification/texts.py) and passages of Python's manual, which pydoc
provides. No published figure is measured over this text.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import Value, canonical_json
from llmc.compiler.architectures.shared.names import EMBED_LM_HEAD
from llmc.compiler.code import code_digest
from llmc.compiler.options import Option
from llmc.compiler.stages import StageReport, toolchain
from llmc.compiler.targets.costs import Timing
from llmc.errors import CheckpointError, InputError, VerificationError
from llmc.paths import expanded
from llmc.strict_json import loads

if TYPE_CHECKING:
    from llmc.artifacts.digest import Blob
    from llmc.artifacts.store.workspace import Workspace
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.stages import Stages
    from llmc.compiler.weights.mixed import GroupCost
    from llmc.compiler.weights.sensitivity import Judged

CALIBRATE: Option[str | None] = Option(
    "calibrate", str, None,
    "With --quantize int4: calibrate the quantized weights over this text (GPTQ); own: llmc's own text.",
    metavar="FILE|own", shapes_executable=False,
)  # fmt: skip
MAX_KL: Option[float | None] = Option(
    "max_kl", float, None,
    "The most mean KL divergence from the reference, in nats over llmc's text, that passes; int4 keeps it by 8 bits "
    "for the matrices that need them.",
    metavar="NATS", shapes_executable=False,
)  # fmt: skip
LM_HEAD_BITS: Option[int | None] = Option(
    "lm_head_bits", int, None,
    "Bits of lm_head and embedding with --quantize int4: 4 or 8. Default: 8, or with --max-kl what it allows.",
    metavar="4|8",
)  # fmt: skip
_SHARE = 0.9
"""Share of the bound, less what the device adds, that 4-bit matrices may use; the rest is a margin."""
COST, SENSE_COST = Timing(fixed=2.0, parameters=180.0), Timing(fixed=2.0, parameters=90.0)
"""Costs of the stages, from measured processor time."""


@dataclass(frozen=True)
class Mixed:
    """The result of mixed-precision selection.

    wide         names of the matrices in layers that stay in 8 bits
    head_bits    bits of embedding and lm_head
    facts        for a target's analysis, empty without a bound: {"mixed": {"matrices": count, "in_8_bits": count,
                 "bits": mean bits a weight, "lm_head_bits", "mean_kl"}}
    """

    wide: frozenset[str] = frozenset()
    lm_head_bits: int = 8
    facts: Mapping[str, Any] = field(default_factory=dict)


def calibration_costs(options: CompileOptions) -> dict[str, Timing]:
    """Return the calibration entries of `Costs.stage_costs`."""
    if options.quantize != "int4":
        return {}
    requested = {"calibrate": (CALIBRATE, COST), "sense": (MAX_KL, SENSE_COST)}
    return {kind: cost for kind, (option, cost) in requested.items() if option.of(options) is not None}


def require_calibratable(options: CompileOptions) -> None:
    """Raise InputError for an unreadable text, an invalid bound, or an option of another format."""
    given, bound, lm_head = CALIBRATE.of(options), MAX_KL.of(options), LM_HEAD_BITS.of(options)
    if lm_head not in (None, 4, 8):
        raise InputError(f"{LM_HEAD_BITS.flag} {lm_head} must be 4 or 8")
    if lm_head is not None and options.quantize != "int4":
        raise InputError(f"{LM_HEAD_BITS.flag} is for --quantize int4, and this is {options.quantize}; leave it out")
    if bound is not None and not (math.isfinite(bound) and bound > 0):
        raise InputError(f"{MAX_KL.flag} {bound} must be a number of nats above 0, as in 0.05")
    if given is not None and options.quantize != "int4":
        raise InputError(f"{CALIBRATE.flag} is for --quantize int4, and this is {options.quantize}; leave it out")
    if given is not None:
        given_text(given)


def calibrated(stages: Stages, options: CompileOptions, added: float) -> tuple[Stages, Mixed]:
    """Return the stages over the calibrated checkpoint, if a text was given, and the matrices that stay in 8 bits.

    `added` is the mean divergence of everything else in 8 bits. Raises VerificationError for a bound that 8 bits
    exceed.
    """
    if options.quantize != "int4":
        return stages, Mixed()
    given, bound, lm_head = CALIBRATE.of(options), MAX_KL.of(options), LM_HEAD_BITS.of(options)
    if given is not None:
        stages = _with_blocks(stages, given)
    if bound is None:
        return stages, Mixed(lm_head_bits=lm_head or 8)
    return stages, _mixed(stages, _SHARE * (bound - added), lm_head)


def _with_blocks(stages: Stages, given: str) -> Stages:
    from llmc.compiler.checkpoint.calibrated import CalibratedCheckpoint

    sequences = sequences_in(stages.checkpoint, given)

    def build(workspace: Workspace) -> Mapping[str, Blob]:
        from llmc.compiler.weights.calibration import calibrate

        with workspace.writer() as out:
            offsets = calibrate(stages.checkpoint, sequences, out, _report(stages, "calibrate"))
        assert out.blob is not None  # the blob is set once the block has ended without an error
        return {"blocks": out.blob, "offsets": workspace.put_bytes(canonical_json(offsets))}

    entry = stages.run("calibrate", _components(stages, _with_blocks, text=sequences), build)
    offsets = loads(stages.store.get_bytes(entry.outputs["offsets"].digest))
    digest = digest_bytes(canonical_json([blob.digest for _, blob in sorted(entry.outputs.items())]))
    built = copy(stages)
    built.checkpoint = CalibratedCheckpoint(stages.checkpoint, stages.path(entry.outputs["blocks"]), offsets, digest)
    return built


def _mixed(stages: Stages, most: float, lm_head: int | None) -> Mixed:
    """Select what stays in 8 bits for a divergence of at most `most`; without `lm_head`, it is one more candidate."""
    judged = judged_in(stages.checkpoint)
    reached, sensed = _sensed(stages, judged, embed_lm_head=lm_head != 8)
    costs = [cost for cost in sensed if EMBED_LM_HEAD.isdisjoint(cost.names)]
    embed_lm_head = [cost for cost in sensed if cost not in costs]
    names, ends = (frozenset(name for cost in each for name in cost.names) for each in (costs, embed_lm_head))
    fixed = sum(cost.divergence for cost in embed_lm_head) if lm_head else 0.0
    chosen = costs if lm_head else sensed

    def build(workspace: Workspace) -> Mapping[str, Blob]:
        from llmc.compiler.weights.mixed import widened
        from llmc.compiler.weights.sensitivity import divergence

        kl, wide = reached, frozenset[str]()
        while kl > most:
            if all(wide.issuperset(cost.names) for cost in chosen):
                beside = f" with {LM_HEAD_BITS.flag} 4" if lm_head == 4 else ""
                raise VerificationError(
                    f"{MAX_KL.flag}: with all {len(names)} matrices in 8 bits{beside} the mean KL is {kl:.2g} nats, "
                    f"and the bound leaves {max(most, 0):.2g} for them; give a higher one, or --quantize none"
                )
            wide = widened(chosen, wide, kl, most, fixed)
            kl, _ = divergence(stages.checkpoint, judged, wide, [], _report(stages, "mix"), embed_lm_head=lm_head != 8)
        eights = sum(cost.weights for cost in costs if wide.issuperset(cost.names))
        bits = 4 + 4 * eights / sum(cost.weights for cost in costs)
        facts = {
            "matrices": len(names), "in_8_bits": len(wide - ends), "bits": round(bits, 3), "mean_kl": round(kl, 6),
            "lm_head_bits": lm_head or (4 if ends - wide else 8),
        }  # fmt: skip
        return {"mix": workspace.put_bytes(canonical_json({"wide": sorted(wide - ends), "mixed": facts}))}

    components = _components(
        stages, _mixed, judged=asdict(judged), costs=[asdict(cost) for cost in sensed], most=most, lm_head=lm_head
    )
    found = loads(stages.store.get_bytes(stages.run("mix", components, build).outputs["mix"].digest))
    facts = found["mixed"]
    return Mixed(frozenset(found["wide"]), facts["lm_head_bits"], {"mixed": facts})


def _sensed(stages: Stages, judged: Judged, *, embed_lm_head: bool) -> tuple[float, list[GroupCost]]:
    """The divergence with everything in 4 bits, and the cost of each matrix group."""
    from llmc.compiler.weights.mixed import GroupCost

    probe = sequences_in(stages.checkpoint, OWN)[0]

    def build(workspace: Workspace) -> Mapping[str, Blob]:
        from llmc.compiler.weights.sensitivity import divergence

        reached, costs = divergence(
            stages.checkpoint, judged, frozenset(), probe, _report(stages, "sense"), embed_lm_head=embed_lm_head
        )
        return {"costs": workspace.put_bytes(canonical_json([reached, [asdict(cost) for cost in costs]]))}

    components = _components(stages, _sensed, judged=asdict(judged), probe=probe, embed_lm_head=embed_lm_head)
    reached, costs = loads(stages.store.get_bytes(stages.run("sense", components, build).outputs["costs"].digest))
    return reached, [GroupCost(**{**cost, "names": tuple(cost["names"])}) for cost in costs]


def _components(stages: Stages, stage: Callable[..., Any], **read: Any) -> dict[str, Value]:
    return {
        **stages.reading(tokenizer=True),
        **{name: digest_bytes(canonical_json(value)) for name, value in read.items()},
        **toolchain("torch", "transformers", "numpy", python=True),
        "code": code_digest(stage, type(stages.checkpoint)),
    }


def _report(stages: Stages, kind: str) -> Callable[[int, int], None]:
    return lambda done, total: stages.report(StageReport(kind, False, None, done, total))


def mixed_lines(analysis: Mapping[str, Any]) -> list[str]:
    """Format `Mixed.facts` of a target's analysis as a line for people."""
    if (found := analysis.get("mixed")) is None:
        return []
    return [
        f"of {found['matrices']} matrices in layers {found['in_8_bits']} in 8 bits, the others in 4: "
        f"{found['bits']:.2f} bits a weight; embedding and lm_head in {found['lm_head_bits']}; a mean KL of "
        f"{found['mean_kl']:.2g} nats by 4 bits alone"
    ]


OWN = "own"
"""The value of --calibrate that selects llmc's own text."""
_MOST = 1 << 24
"""The most characters of a text."""
_PASSAGE = 1500
"""The most characters of one topic of the manual."""


def sequences_in(checkpoint: Checkpoint, given: str) -> list[list[int]]:
    """Tokenize the text `given` to --calibrate. Raises InputError, and CheckpointError for a foreign tokenizer."""
    from llmc.compiler.weights.calibration import TOKENS, sequences_of
    from llmc.runtime.text.tokenizer import Tokenizer

    text = given_text(given)
    encode = Tokenizer(checkpoint.tokenizer_json()).encode
    tokens = _own(encode, TOKENS) if text is None else encode(text)
    found = sequences_of(tokens, _longest(checkpoint))
    if not found:
        raise InputError(f"--calibrate: the text has {len(tokens)} tokens; give one of some thousand")
    known = int(checkpoint.config["vocab_size"])
    if any(token >= known for tokens in found for token in tokens):
        raise CheckpointError(f"{checkpoint.path}: its tokenizer gives ids above the {known} of its embedding")
    return found


def judged_in(checkpoint: Checkpoint) -> Judged:
    """Return the text of texts.py, which the verification gate also uses."""
    from llmc.compiler.verification.probes import FIRST, parts_of
    from llmc.compiler.weights.sensitivity import Judged

    parts = parts_of(checkpoint, int(checkpoint.config["vocab_size"]))
    return Judged([part[: _longest(checkpoint)] for _, part in parts], FIRST - 1)


def _longest(checkpoint: Checkpoint) -> int:
    return int(checkpoint.config.get("max_position_embeddings") or 1 << 16)


def given_text(given: str) -> str | None:
    """Read the text of a file; None for OWN. Raises InputError."""
    if given == OWN:
        return None
    try:
        with expanded(given).open(encoding="utf-8") as file:
            return file.read(_MOST)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"--calibrate {given}: cannot be read as UTF-8 text ({error}); name a file, or {OWN}"
        ) from error


def _own(encode: Callable[[str], list[int]], count: int) -> list[int]:
    """The first `count` tokens of llmc's passages, each once, and of the manual's."""
    from pydoc_data.topics import topics

    from llmc.compiler.verification.texts import PASSAGES

    manual = [text[:_PASSAGE] for _, text in sorted(topics.items())]
    random.Random(0).shuffle(manual)  # noqa: S311 - no secret, and the same everywhere
    tokens: list[int] = []
    for passage in (*PASSAGES, *manual):
        if len(tokens) < count:
            tokens += encode(f"{passage}\n\n")
    return tokens[:count]
