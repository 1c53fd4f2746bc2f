"""Calibration of 4-bit weights, as a cached stage: the checkpoint with the blocks that a text speaks for, and which of
its matrices stay in 8 bits so that a bound on the divergence is kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import canonical_json
from llmc.compiler.code import code_digest
from llmc.compiler.options import Option
from llmc.compiler.stages import StageReport, toolchain
from llmc.compiler.targets.calibration_text import OWN, given_text, tokens_of
from llmc.compiler.targets.costs import Cost
from llmc.errors import InputError, VerificationError
from llmc.strict_json import loads

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmc.artifacts.digest import Blob
    from llmc.artifacts.store.workspace import Workspace
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.stages import Stages
    from llmc.compiler.weights.calibration import Text

CALIBRATE: Option[str | None] = Option(
    "calibrate", str, None,
    "With --quantize int4: choose codes by what a text makes of the model (GPTQ); own: llmc's own text.",
    metavar=f"FILE|{OWN}", shapes_executable=False,
)  # fmt: skip
MAX_KL: Option[float | None] = Option(
    "max_kl", float, None,
    "The most mean KL divergence from the reference, in nats over llmc's text, that passes; int4 keeps it by 8 bits "
    "for the matrices that need them.",
    metavar="NATS", shapes_executable=False,
)  # fmt: skip
_SHARE = 0.9
"""Of the bound, less what the device adds, for the matrices in layers: a margin."""
_BITS = {False: 4, True: 8}


COST = Cost(fixed=2.0, parameters=45.0)
"""Of the stage."""


@dataclass(frozen=True)
class Mixed:
    """`wide`: names of the matrices that stay in 8 bits. `facts`, for a target's analysis, empty where no bound was
    given: {"mixed": {of how many "matrices" how many are "in_8_bits", the "bits" of a code on average, and the
    "predicted_kl" of all}}."""

    wide: frozenset[str] = frozenset()
    facts: Mapping[str, Any] = field(default_factory=dict)


def calibration_costs(options: CompileOptions) -> dict[str, Cost]:
    """For `Target.stage_costs`."""
    return {"calibrate": COST} if _calibrates(options) else {}


def require_calibratable(options: CompileOptions) -> None:
    """Raise InputError where a text is given for what is not calibrated, or cannot be read, and for a bound that is
    none."""
    given, bound = CALIBRATE.of(options), MAX_KL.of(options)
    if bound is not None and not (math.isfinite(bound) and bound > 0):
        raise InputError(f"{MAX_KL.flag} {bound} must be a number of nats above 0, as in 0.05")
    if given is None:
        return
    if options.quantize != "int4":
        raise InputError(f"{CALIBRATE.flag} is for --quantize int4, and this is {options.quantize}; leave it out")
    given_text(given)


def _calibrates(options: CompileOptions) -> bool:
    return options.quantize == "int4" and (CALIBRATE.of(options) is not None or MAX_KL.of(options) is not None)


def calibrated(stages: Stages, options: CompileOptions, added: float) -> tuple[Stages, Mixed]:
    """The same stages over the checkpoint with calibrated blocks, and what stays in 8 bits; unchanged, and nothing,
    where neither a text nor a bound was given. `added`: the mean divergence that is not the matrices' in layers, but
    that of an embedding, a head, a KV cache and activations in 8 bits. Raises VerificationError for a bound that 8 bits
    do not keep either."""
    if not _calibrates(options):
        return stages, Mixed()
    given, bound = CALIBRATE.of(options), MAX_KL.of(options)
    text = tokens_of(stages.checkpoint, given, judged=bound is not None)
    most = None if bound is None else _SHARE * (bound - added)
    components = {
        **stages.reading(tokenizer=True),
        "text": digest_bytes(canonical_json(asdict(text))),
        **({} if most is None else {"most": repr(most)}),
        **toolchain("torch", "transformers", "numpy", python=True),
        "code": code_digest(calibrated, type(stages.checkpoint)),
    }

    def tell(done: int, layers: int) -> None:
        stages.report(StageReport("calibrate", False, None, done, layers))

    def build(workspace: Workspace) -> Mapping[str, Blob]:
        file = workspace.folder / "blocks"
        found = _chosen(stages, text, most, file, tell)
        return {"blocks": workspace.put_file(file), "choice": workspace.put_bytes(canonical_json(found))}

    from llmc.compiler.checkpoint.calibrated import CalibratedCheckpoint

    entry = stages.run("calibrate", components, build)
    found = loads(stages.store.get_bytes(entry.outputs["choice"].digest))
    mixed = Mixed(frozenset(found["wide"]), found["facts"])
    if not found["places"]:
        return stages, mixed
    digest = digest_bytes(canonical_json([blob.digest for _, blob in sorted(entry.outputs.items())]))
    made = copy(stages)
    file = stages.path(entry.outputs["blocks"])
    made.checkpoint = CalibratedCheckpoint(stages.checkpoint, file, found["places"], digest)
    return made, mixed


def _chosen(
    stages: Stages, text: Text, most: float | None, file: Path, tell: Callable[[int, int], None]
) -> dict[str, Any]:  # fmt: skip
    """Write the blocks to `file`; returns where they lie, which matrices stay in 8 bits, and the facts of it."""
    from llmc.compiler.weights.calibration import calibrate
    from llmc.compiler.weights.mixed import widened

    wide: frozenset[str] = frozenset()
    with file.open("wb") as out:
        found = calibrate(stages.checkpoint, text, out, wide, tell)
    if most is None:
        return {"places": found.places, "wide": [], "facts": {}}
    costs = found.costs
    names = [name for cost in costs for name in cost.names]
    while found.divergence > most:
        if wide.issuperset(names):
            raise VerificationError(
                f"{MAX_KL.flag}: with all {len(names)} matrices in 8 bits the mean KL is {found.divergence:.2g} nats, "
                f"and the bound leaves {max(most, 0):.2g} for them; give a higher one, or --quantize none"
            )
        wide = widened(costs, wide, found.divergence, most)
        with file.open("wb") as out:
            found = calibrate(stages.checkpoint, text, out, wide, tell)
    weights = [(cost.weights, wide.issuperset(cost.names)) for cost in costs]
    bits = sum(count * _BITS[eight] for count, eight in weights) / sum(count for count, _ in weights)
    kl = round(found.divergence, 6)
    facts = {"matrices": len(names), "in_8_bits": len(wide), "bits": round(bits, 3), "predicted_kl": kl}
    return {"places": found.places, "wide": sorted(wide), "facts": {"mixed": facts}}


def mixed_lines(analysis: Mapping[str, Any]) -> list[str]:
    """What `Mixed.facts` in a target's analysis say, in a line for people."""
    if (found := analysis.get("mixed")) is None:
        return []
    return [
        f"of {found['matrices']} matrices in layers {found['in_8_bits']} in 8 bits, the others in 4: "
        f"{found['bits']:.2f} bits a weight, and a mean KL of {found['predicted_kl']:.2g} nats by these alone"
    ]
