"""Bundles and baselines of one checkpoint, prepared for a comparison: all have the same weights."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from baselines.baseline_models import BaselineModels, Report, weights_read
from baselines.catalogue import Requested
from baselines.environment import installed, require
from baselines.worker import Contender
from llmc.artifacts.bundle.manifest import Manifest
from llmc.artifacts.store.store import Store
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.checkpoint.base import Checkpoint, stored_forms
from llmc.compiler.pipeline.provenance import find_model
from llmc.errors import CheckpointError, InputError
from llmc.runtime.bundle import Bundle

if TYPE_CHECKING:
    from llmc.settings import Settings

TEXT_TOKENS = 102
"""Tokens of each of the texts of verification/texts.py that quality is measured over: what `llmc verify` takes."""
DTYPE_BITS = {"f32": 32, "bf16": 16, "f16": 16}


@dataclass(frozen=True)
class Ready:
    """The input of a comparison (compare.py). `reference`: None if no environment here can run it."""

    model: str
    contenders: list[Contender]
    reference: Contender | None
    texts: list[list[int]]
    weights: int
    vocabulary: int


def checkpoint_of(bundle: Bundle, model: str | None, store: Store) -> Checkpoint:
    """The checkpoint that a bundle was compiled from: `model`, or where the store knows that it was.

    Raises InputError if it is not found or has other weights.
    """
    known = bundle.manifest.provenance
    name = model or find_model(store, str(known.get("checkpoint", "")), str(known.get("model", "")))
    try:
        checkpoint = open_checkpoint(name)
    except CheckpointError as error:
        if model is not None:
            raise
        raise InputError(
            f"{bundle.path}: the checkpoint {name!r} that it was compiled from is not here: name it with --model"
        ) from error
    if known.get("checkpoint") != checkpoint.digest():
        raise InputError(
            f"{checkpoint.path} is not what {bundle.path} was compiled from: a comparison is of the same weights"
        )
    return checkpoint


def default_folder(settings: Settings, checkpoint: Checkpoint) -> Path:
    """The folder for the baselines' forms of a checkpoint."""
    return settings.cache_dir / "baselines" / checkpoint.digest().removeprefix("sha256:")[:16]


def make_ready(
    bundles: Mapping[str, Bundle], requested: Sequence[Requested], checkpoint: Checkpoint, folder: Path, python: str,
    report: Report, quality: bool = True,
) -> Ready:  # fmt: skip
    """Make the baselines' forms of the checkpoint, and describe all contenders.

    Raises DeviceError for a baseline that is not installed in `python`, before anything is made. Without `quality` no
    reference is looked for.
    """
    versions = require(requested, python)
    models = BaselineModels(checkpoint, folder, python, report)
    contenders = [_ours(name, bundle, checkpoint) for name, bundle in bundles.items()]
    for one in requested:
        options = dict(one.variant.options)
        if one.baseline.name == "openvino-genai":
            options["cache"] = str(folder / "openvino-cache")
        contenders.append(
            Contender(
                one.label, "baseline", one.baseline.engine, python, str(models.get(one.variant.form).absolute()),
                options, one.variant.bits, one.variant_name,
                {name: versions[name] for name in one.distributions}, one.variant.searched,
            )
        )  # fmt: skip
    reference = _reference(models, python) if quality else None
    vocabulary = min(int(b.manifest.model["vocab_size"]) for b in bundles.values())
    return Ready(
        checkpoint.name or checkpoint.path.stem, contenders, reference,
        texts(checkpoint, vocabulary) if quality else [], weights_read(checkpoint), vocabulary,
    )  # fmt: skip


def _ours(name: str, bundle: Bundle, checkpoint: Checkpoint) -> Contender:
    manifest = bundle.manifest
    versions = {"llmc": manifest.llmc, **manifest.toolchain}
    return Contender(
        name, "llmc", "bundle", sys.executable, str(bundle.path.absolute()), {}, nominal_bits(manifest, checkpoint),
        str(manifest.options.get("quantize", "")), versions,
    )  # fmt: skip


def nominal_bits(manifest: Manifest, checkpoint: Checkpoint) -> float | None:
    """Bits of a weight in a bundle, without scales, on average: by how it was quantised, else by its type.

    None if unknown.
    """
    how = str(manifest.options.get("quantize", "none"))
    if how == "keep":
        stored = stored_forms(checkpoint)
        sizes = {n: math.prod(s) for n in checkpoint.tensor_names() if len(s := checkpoint.shape(n)) == 2}
        four = sum(size for name, size in sizes.items() if name in stored and stored[name].bits == 4)
        return 8 - 4 * four / sum(sizes.values()) if stored else None
    if how.startswith("int") and how[3:4].isdigit():
        return int(how[3:4])
    return DTYPE_BITS.get(str(manifest.options.get("dtype")))


def _reference(models: BaselineModels, python: str) -> Contender | None:
    """transformers in float32, here or where the baselines are."""
    for candidate in (sys.executable, python):
        if len(installed(candidate, ("torch", "transformers"))) == 2:
            folder = models.get("huggingface")
            return Contender("transformers float32", "baseline", "eager", candidate, str(folder.absolute()), bits=32)
    return None


def texts(checkpoint: Checkpoint, vocabulary: int) -> list[list[int]]:
    """Token ids of the texts that quality is measured over; random ones for a model without a tokenizer."""
    import random

    from llmc.compiler.verification.texts import TEXTS
    from llmc.runtime.text.tokenizer import Tokenizer

    try:
        encode = Tokenizer(checkpoint.tokenizer_json()).encode
        found = [list(encode(text))[:TEXT_TOKENS] for text in TEXTS.values()]
    except CheckpointError:
        draw = random.Random(0)
        found = [draw.choices(range(vocabulary), k=TEXT_TOKENS) for _ in TEXTS]
    return [[token for token in text if token < vocabulary] for text in found]
