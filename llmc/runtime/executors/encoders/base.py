"""The contract of executors without a cache: a batch of token ids in, hidden states or scores out.

An encoder is stateless: `encode` may be called from `streams` threads at a time. It runs one of the bundle's
executables; what is padding is told by lengths, and never changes a live row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llmc.errors import ArtifactError
from llmc.runtime.executors.compilations import CompilationCounter

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest_schema import Executable
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.base import Content

TOKEN_IDS, LENGTHS, TYPE_IDS = "token_ids", "lengths", "type_ids"
"""Inputs of every executable: [B, T] int64, [B] int64 and, where the model has kinds of segments, [B, T] int64."""
PHASE = "encode"
"""The phase of an encoder's executables in a manifest, where it has one a bucket; "any" where one runs every shape."""


class Encoder(ABC):
    """Replays a bundle's executables on `threads` CPUs."""

    name: ClassVar[str]
    opens: ClassVar[Mapping[str, Content]]
    """As `Executor.opens`."""

    def __init__(self, bundle: Bundle, threads: int) -> None:
        self.bundle = bundle
        self.threads = threads
        self.compilations = CompilationCounter()

    @classmethod
    @abstractmethod
    def check(cls, bundle: Bundle) -> None:
        """Raise DeviceError or ArtifactError when this host cannot run `bundle`, saying what differs."""

    @property
    def exact(self) -> bool:
        """Whether any shape runs as it is, so that a batch is padded to its longest row alone."""
        return not self.bundle.manifest.options.get("static_dims")

    @property
    def streams(self) -> int:
        """Batches that run at the same time."""
        return 1

    @property
    def type_ids(self) -> bool:
        """Whether the model has kinds of segments (`TYPE_IDS`)."""
        return bool(self.bundle.manifest.options.get("type_ids"))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of what `encode` takes."""
        return (TOKEN_IDS, LENGTHS, TYPE_IDS) if self.type_ids else (TOKEN_IDS, LENGTHS)

    @property
    def in_place_of(self) -> str:
        """The device that the bundle is for, where another one runs it; "" where it is its own."""
        return ""

    @abstractmethod
    def encode(self, inputs: Mapping[str, NDArray[np.int64]], stream: int = 0) -> NDArray[np.float32]:
        """Hidden states [B, T, H] of a model that embeds, logits [B, labels] of one that scores.

        The array is valid until the next call with the same `stream`, a number below `streams`; a stream has one
        caller at a time.
        """

    @abstractmethod
    def open_all(self) -> None:
        """Open every executable that is not open yet."""

    def ready(self) -> None:
        """All that the bundle brings is open: what the engine opens from now on counts as a compilation."""
        self.compilations.ready()

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes held, by purpose."""

    @abstractmethod
    def close(self) -> None:
        """Release everything."""

    def executable_for(self, batch: int, tokens: int) -> Executable:
        """The manifest's executable of a shape. Raises ArtifactError where the bundle has none."""
        if self.exact:
            return self.bundle.executable("any", None, None, None)
        return self.bundle.executable(PHASE, batch, tokens, 0)


def require_outputs(bundle: Bundle, shape: Any, width: int) -> None:
    """Raise ArtifactError for results that are not `width` wide, as the manifest says they are."""
    if not shape or shape[-1] != width:
        raise ArtifactError(
            f"{bundle.path}: its graphs return {list(shape)}, the manifest says {width} a row; compile again: "
            f"{bundle.recompile_hint}"
        )
