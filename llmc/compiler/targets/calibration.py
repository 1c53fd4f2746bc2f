"""Calibration of 4-bit weights, as a cached stage: the checkpoint with the blocks that a text speaks for."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import canonical_json
from llmc.compiler.code import code_digest
from llmc.compiler.options import Option
from llmc.compiler.stages import toolchain
from llmc.compiler.targets.costs import Cost
from llmc.errors import CheckpointError, InputError
from llmc.paths import expanded
from llmc.strict_json import loads

if TYPE_CHECKING:
    from llmc.artifacts.digest import Blob
    from llmc.artifacts.store.workspace import Workspace
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.stages import Stages

OWN = "own"
"""In place of a file: llmc's own passages (verification/passages.py), which no figure is taken over."""
CALIBRATE: Option[str | None] = Option(
    "calibrate", str, None,
    "With --quantize int4: choose codes by what a text makes of the model (GPTQ); own: llmc's own text.",
    metavar=f"FILE|{OWN}", shapes_executable=False,
)  # fmt: skip
_MOST = 1 << 24
"""Characters of a text, at most."""


COST = Cost(fixed=2.0, parameters=45.0)
"""Of the stage."""


def calibration_costs(options: CompileOptions) -> dict[str, Cost]:
    """For `Target.stage_costs`."""
    return {} if CALIBRATE.of(options) is None else {"calibrate": COST}


def require_calibratable(options: CompileOptions) -> None:
    """Raise InputError where a text is given for what is not calibrated, or cannot be read."""
    given = CALIBRATE.of(options)
    if given is None:
        return
    if options.quantize != "int4":
        raise InputError(f"{CALIBRATE.flag} is for --quantize int4, and this is {options.quantize}; leave it out")
    _text(given)


def calibrated(stages: Stages, options: CompileOptions) -> Stages:
    """The same stages over the checkpoint with calibrated blocks; unchanged where no text was given."""
    given = CALIBRATE.of(options)
    if given is None:
        return stages
    tokens = _tokens(stages, _text(given))
    components = {
        **stages.reading(tokenizer=True),
        "text": digest_bytes(canonical_json(tokens)),
        **toolchain("torch", "transformers", "numpy", python=True),
        "code": code_digest(calibrated, type(stages.checkpoint)),
    }

    def build(workspace: Workspace) -> Mapping[str, Blob]:
        from llmc.compiler.weights.calibration import calibrate

        with workspace.writer() as out:
            places = calibrate(stages.checkpoint, tokens, out)
        assert out.blob is not None  # it is set once the block has ended well
        return {"blocks": out.blob, "places": workspace.put_bytes(canonical_json(places))}

    from llmc.compiler.checkpoint.calibrated import CalibratedCheckpoint

    entry = stages.run("calibrate", components, build)
    places = loads(stages.store.get_bytes(entry.outputs["places"].digest))
    digest = digest_bytes(canonical_json([blob.digest for _, blob in sorted(entry.outputs.items())]))
    made = copy(stages)
    made.checkpoint = CalibratedCheckpoint(stages.checkpoint, stages.path(entry.outputs["blocks"]), places, digest)
    return made


def _tokens(stages: Stages, text: str | None) -> list[list[int]]:
    """Sequences of the text; None: of llmc's own."""
    from llmc.compiler.verification.passages import long_text
    from llmc.compiler.weights.calibration import TOKENS, sequences_of
    from llmc.runtime.text.tokenizer import Tokenizer

    encode = Tokenizer(stages.checkpoint.tokenizer_json()).encode
    tokens = long_text(encode, TOKENS) if text is None else encode(text)
    found = sequences_of(tokens, int(stages.checkpoint.config.get("max_position_embeddings") or TOKENS))
    if not found:
        raise InputError(f"{CALIBRATE.flag}: the text has {len(tokens)} tokens; give one of some thousand")
    known = int(stages.checkpoint.config["vocab_size"])
    if any(token >= known for tokens in found for token in tokens):
        raise CheckpointError(f"{stages.checkpoint.path}: its tokenizer gives ids above the {known} of its embedding")
    return found


def _text(given: str) -> str | None:
    if given == OWN:
        return None
    path: Path = expanded(given)
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(_MOST)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{CALIBRATE.flag} {given}: cannot be read as UTF-8 text ({error}); name a file, or {OWN}"
        ) from error
