"""Encoders on the fake device: a toy that embeds or scores, compiled in milliseconds with numpy only.

A checkpoint has the toy model's tensors (targets/fake.py), E and W, both [vocab_size, hidden_size], and the
configuration of any model that embeds. For a text with tokens 0 … n − 1:

    state of token t = Σ_{j < n} DECAY^|t − j| · (1 + j / max_position_embeddings) · E[token_j]     embed: [T, hidden]
    logits           = W[: labels] · state of token 0                                               score: [labels]

Each state depends on every token of its text, on both sides, and on no other text and no padding.

    executable = { "batch", "query": sizes, null where they are dynamic, "decay", "positions", "labels": 0 to embed,
                   "tensors": {"embedding" | "head": {"offset": bytes, "shape": [rows, columns]}} }
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from llmc.artifacts.key import canonical_json
from llmc.compiler.checkpoint.sentence_files import labels_of
from llmc.compiler.code import code_digest
from llmc.compiler.targets.encoder import CompiledEncoder, EncoderCase, EncoderTarget
from llmc.compiler.targets.fake import DECAY
from llmc.compiler.weights.stage import stored_weights
from llmc.errors import CheckpointError
from llmc.runtime.executors.fake.device import EMBEDDING, LM_HEAD

if TYPE_CHECKING:
    from llmc.artifacts.digest import Blob
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.workspace import Workspace
    from llmc.buckets.encoding import EncodePlan
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.stages import Stages
    from llmc.compiler.verification.encoding import Reference


class FakeEncoderTarget(EncoderTarget):
    """One executable a bucket, unless requested otherwise."""

    name: ClassVar[str] = "fake"
    encoder: ClassVar[str] = "fake-encoder"
    reference_name: ClassVar[str] = "toy"
    reference_packages: ClassVar[tuple[str, ...]] = ()

    def specialised(self, options: CompileOptions) -> bool:
        return options.specialise is not False

    def toolchain(self) -> dict[str, str]:
        from llmc.runtime.executors.fake.executor import FAKE_VERSION

        return {"fake": FAKE_VERSION}

    def reference(self, checkpoint: Checkpoint, case: EncoderCase) -> Reference:
        from llmc.compiler.verification.encoding import toy_encoder

        return toy_encoder(checkpoint, case.task)

    def traced(self, stages: Stages, case: EncoderCase, options: CompileOptions) -> Iterator[tuple[str, str]]:
        yield "toy", canonical_json(_constants(stages, case)).decode()

    def lowered(
        self, stages: Stages, plan: EncodePlan, case: EncoderCase, options: CompileOptions
    ) -> Iterator[tuple[str, str]]:  # fmt: skip
        yield "placements", stages.path(self._weights(stages).outputs["placements"]).read_text()

    def make(self, stages: Stages, plan: EncodePlan, case: EncoderCase, options: CompileOptions) -> CompiledEncoder:
        weights = self._weights(stages)
        shapes: list[tuple[int, int] | None] = [None]
        if options.specialise:
            shapes = [(bucket.batch, bucket.query) for bucket in plan.buckets]
        found = [(shape, self._executable(stages, weights, case, shape)) for shape in shapes]
        return CompiledEncoder(found, {"weights": weights.outputs["weights"].digest}, {"type_ids": False})

    def _weights(self, stages: Stages) -> Entry:
        checkpoint = stages.checkpoint
        if set(checkpoint.tensor_names()) != {EMBEDDING, LM_HEAD}:
            raise CheckpointError(f"{checkpoint.path}: device fake takes only the toy model of targets/fake.py")
        return stored_weights(stages, {"embedding": EMBEDDING, "head": LM_HEAD})

    def _executable(self, stages: Stages, weights: Entry, case: EncoderCase, shape: tuple[int, int] | None) -> Entry:
        batch, query = shape or (None, None)
        constants = {"batch": batch, "query": query, **_constants(stages, case)}
        placements = weights.outputs["placements"]
        components = {**constants, "placements": placements.digest, "code": code_digest(self._executable)}

        def build(workspace: Workspace) -> Mapping[str, Blob]:
            tensors = json.loads(stages.path(placements).read_bytes())
            built = {**constants, "decay": DECAY, "tensors": tensors}
            return {"executable": workspace.put_bytes(canonical_json(built))}

        return stages.run("executable", components, build)


def _constants(stages: Stages, case: EncoderCase) -> dict[str, int]:
    config = stages.checkpoint.config
    labels = labels_of(config) if case.task == "score" else 0
    return {"positions": int(config["max_position_embeddings"]), "labels": labels}
