"""An encoder on the fake device: numpy replays what targets/encoders/fake.py compiles, at the compiled shape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llmc.errors import ArtifactError
from llmc.runtime.executors.base import EXECUTABLES, LENGTHS, TOKEN_IDS, ExecutorDescription
from llmc.runtime.executors.encoders import Encoder
from llmc.runtime.executors.fake.executor import FakeExecutor

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Executable
    from llmc.runtime.bundle import Bundle


class FakeEncoder(Encoder):
    """Replays fake encoder executables. It has as many independent streams as threads."""

    description: ClassVar[ExecutorDescription] = ExecutorDescription({"weights": "data", EXECUTABLES: "data"})

    @classmethod
    def check(cls, bundle: Bundle) -> None:
        FakeExecutor.check(bundle)

    @property
    def streams(self) -> int:
        return self.threads

    def encode(self, inputs: Mapping[str, NDArray[np.int64]], stream: int = 0) -> NDArray[np.float32]:
        """Each token's output is a sum over live tokens, weighted by distance. Padding is masked by selection."""
        ids, lengths = inputs[TOKEN_IDS], inputs[LENGTHS]
        program, (embedding, head) = self._open(self.executable_for(*ids.shape))
        compiled = program["batch"], program["query"]
        if any(fixed not in (None, size) for fixed, size in zip(compiled, ids.shape, strict=True)):
            raise ArtifactError(
                f"an executable compiled for batch, query {compiled} was given {ids.shape}; compile again"
            )
        at = np.arange(ids.shape[1])
        vectors = (1 + at / program["positions"])[:, None] * embedding[ids]
        live = np.where((at < lengths[:, None])[..., None], vectors, 0).astype(np.float64)
        hidden = np.einsum("tj,bjh->bth", np.power(program["decay"], np.abs(at[:, None] - at)), live)
        if program["labels"]:
            hidden = hidden[:, 0] @ head[: program["labels"]].T.astype(np.float64)
        found: NDArray[np.float32] = hidden.astype(np.float32)
        return found

    def _load(self, executable: Executable) -> tuple[dict[str, Any], list[NDArray[np.float32]]]:
        """Its fields, and the embedding and lm_head, mapped read-only."""
        program, weights = json.loads(self.bundle.files.read(executable.blob)), self.bundle.files.path("weights")
        placements = [program["tensors"][name] for name in ("embedding", "head")]
        return program, [np.memmap(weights, np.float32, "r", at["offset"], tuple(at["shape"])) for at in placements]
