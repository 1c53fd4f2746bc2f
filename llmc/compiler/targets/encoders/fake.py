"""Encoders on the fake device: a toy that embeds or scores, compiled in milliseconds with numpy alone.

A checkpoint has the toy model's tensors (targets/fake.py), E and W, both [vocab_size, hidden_size], and the
configuration of any model that embeds. Of a text with tokens 0 … n − 1:

    state of token t = Σ_{j < n} DECAY^|t − j| · (1 + j / max_position_embeddings) · E[token_j]     embed: [T, hidden]
    logits           = W[: labels] · state of token 0                                               score: [labels]

So each state depends on every token of its text, on both sides, and on no other text and no padding.

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
from llmc.compiler.targets.encoders.base import Case, EncoderTarget, Made
from llmc.compiler.targets.fake import DECAY
from llmc.errors import CheckpointError
from llmc.runtime.executors.fake.program import EMBEDDING, HEAD

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
    """See the module's docstring. One executable a bucket, unless it is asked for otherwise."""

    name: ClassVar[str] = "fake"
    encoder: ClassVar[str] = "fake-encoder"
    reference_name: ClassVar[str] = "toy"
    reference_packages: ClassVar[tuple[str, ...]] = ()

    def specialised(self, options: CompileOptions) -> bool:
        """Yes, so that tests see buckets."""
        return options.specialise is not False

    def toolchain(self) -> dict[str, str]:
        """The version that the encoder checks before it replays."""
        from llmc.runtime.executors.fake.executor import FAKE_VERSION

        return {"fake": FAKE_VERSION}

    def reference(self, checkpoint: Checkpoint, case: Case) -> Reference:
        """The toy's definition, token by token."""
        from llmc.compiler.verification.encoding import toy_encoder

        return toy_encoder(checkpoint, case.task)

    def traced(self, stages: Stages, case: Case, options: CompileOptions) -> Iterator[tuple[str, str]]:
        """The constants: the program itself is built in."""
        yield "toy", canonical_json(_constants(stages, case)).decode()

    def lowered(
        self, stages: Stages, plan: EncodePlan, case: Case, options: CompileOptions
    ) -> Iterator[tuple[str, str]]:  # fmt: skip
        """Where the tensors lie."""
        yield "placements", stages.path(self._weights(stages).outputs["placements"]).read_text()

    def make(self, stages: Stages, plan: EncodePlan, case: Case, options: CompileOptions) -> Made:
        """Both tensors in one file, and constants and sizes as JSON for each bucket."""
        weights = self._weights(stages)
        shapes: list[tuple[int, int] | None] = [None]
        if options.specialise:
            shapes = [(bucket.batch, bucket.query) for bucket in plan.buckets]
        found = [(shape, self._executable(stages, weights, case, shape)) for shape in shapes]
        return Made(found, {"weights": weights.outputs["weights"].digest}, {"type_ids": False})

    def _weights(self, stages: Stages) -> Entry:
        def build(workspace: Workspace) -> Mapping[str, Blob]:
            places, checkpoint = {}, stages.checkpoint
            if set(checkpoint.tensor_names()) != {EMBEDDING, HEAD}:
                raise CheckpointError(f"{checkpoint.path}: device fake takes the toy model alone, see targets/fake.py")
            with workspace.writer() as out:
                for name, stored in (("embedding", EMBEDDING), ("head", HEAD)):
                    tensor = checkpoint.tensor(stored)
                    places[name] = {"offset": out.tell(), "shape": tensor.shape}
                    out.write(tensor.tobytes())
            assert out.blob is not None  # it is set once the block has ended well
            return {"weights": out.blob, "placements": workspace.put_bytes(canonical_json(places))}

        return stages.run("weights", {**stages.reading(), "code": code_digest(self._weights)}, build)

    def _executable(self, stages: Stages, weights: Entry, case: Case, shape: tuple[int, int] | None) -> Entry:
        batch, query = shape or (None, None)
        constants = {"batch": batch, "query": query, **_constants(stages, case)}
        places = weights.outputs["placements"]
        components = {**constants, "placements": places.digest, "code": code_digest(self._executable)}

        def build(workspace: Workspace) -> Mapping[str, Blob]:
            tensors = json.loads(stages.path(places).read_bytes())
            made = {**constants, "decay": DECAY, "tensors": tensors}
            return {"executable": workspace.put_bytes(canonical_json(made))}

        return stages.run("executable", components, build)


def _constants(stages: Stages, case: Case) -> dict[str, int]:
    """What a program has of the checkpoint's configuration."""
    config = stages.checkpoint.config
    labels = labels_of(config) if case.task == "score" else 0
    return {"positions": int(config["max_position_embeddings"]), "labels": labels}
