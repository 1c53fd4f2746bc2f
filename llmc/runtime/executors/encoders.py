"""Executors without a cache, by name: a batch of token ids in, hidden states or scores out.

An encoder is stateless: up to `streams` threads may call `encode` at a time. It runs one of the bundle's executables.
Lengths mark the padding, which never changes a live row. Each class is imported when a bundle names it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llmc.errors import ArtifactError, UnknownNameError
from llmc.registry import Registry
from llmc.runtime.executors import installed
from llmc.runtime.executors.base import LENGTHS, TOKEN_IDS, TYPE_IDS, Capabilities, ExecutorDescription
from llmc.runtime.executors.compatibility import warn_in_place_of
from llmc.runtime.executors.compilations import CompilationCounter

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Executable
    from llmc.runtime.bundle import Bundle

ENCODERS = Registry(
    "encoder",
    "llmc.encoders",
    {
        "fake-encoder": "llmc.runtime.executors.fake.executor:FakeEncoder",
        "onnxruntime-encoder": "llmc.runtime.executors.onnxruntime.encoder:OnnxRuntimeEncoder",
        "openvino-encoder": "llmc.runtime.executors.openvino.encoder:OpenVinoEncoder",
        "xla-encoder": "llmc.runtime.executors.xla.executor:XlaEncoder",
    },
)
PHASE = "encode"
"""Manifest phase of encoder executables with one per bucket; "any" if one runs every shape."""


class Encoder(ABC):
    """Replays a bundle's executables on `threads` CPUs."""

    description: ClassVar[ExecutorDescription]

    def __init__(self, bundle: Bundle, threads: int) -> None:
        self.bundle = bundle
        self.threads = threads
        self.capabilities = Capabilities(exact=not bundle.manifest.options.get("static_dims"))
        self.compilations = CompilationCounter()
        self._lock = threading.Lock()
        self._opened: dict[str, Any] = {}

    @classmethod
    @abstractmethod
    def check(cls, bundle: Bundle) -> None:
        """Raise DeviceError or ArtifactError, naming the difference, if this host cannot run `bundle`."""

    @property
    def streams(self) -> int:
        return 1

    @property
    def type_ids(self) -> bool:
        return bool(self.bundle.manifest.options.get("type_ids"))

    @property
    def inputs(self) -> tuple[str, ...]:
        return (TOKEN_IDS, LENGTHS, TYPE_IDS) if self.type_ids else (TOKEN_IDS, LENGTHS)

    @abstractmethod
    def encode(self, inputs: Mapping[str, NDArray[np.int64]], stream: int = 0) -> NDArray[np.float32]:
        """Hidden states [B, T, H] of an embedding model, logits [B, labels] of a scoring model.

        Valid until the next call with the same `stream`, a number below `streams`. Each stream has one caller at a
        time.
        """

    def open_all(self) -> None:
        for executable in self.bundle.manifest.executables:
            self._open(executable)

    def memory(self) -> dict[str, int]:
        return {"weights": self.bundle.files.path("weights").stat().st_size}

    def close(self) -> None:
        self._opened.clear()

    @abstractmethod
    def _load(self, executable: Executable) -> Any:
        """Load an executable. Raises ArtifactError if it cannot be opened."""

    def _open(self, executable: Executable) -> Any:
        with self._lock:
            if executable.blob not in self._opened:
                self._opened[executable.blob] = self._load(executable)
            return self._opened[executable.blob]

    def executable_for(self, batch: int, tokens: int) -> Executable:
        """The manifest's executable of a shape. Raises ArtifactError if there is none."""
        if self.capabilities.exact:
            return self.bundle.executable("any", None, None, None)
        return self.bundle.executable(PHASE, batch, tokens, 0)


def require_outputs(bundle: Bundle, shape: Any, width: int) -> None:
    """Raise ArtifactError if results are not `width` wide, as the manifest states."""
    if not shape or shape[-1] != width:
        raise ArtifactError(
            f"{bundle.path}: its graphs return {list(shape)}, the manifest says {width} a row; compile again: "
            f"{bundle.recompile_hint}"
        )


def encoder_class(name: str) -> type[Encoder]:
    """The encoder called `name`. Raises UnknownNameError, and DeviceError if its package is not installed."""
    found: type[Encoder] = installed(ENCODERS, name)
    return found


def open_encoder(bundle: Bundle, threads: int | None = None) -> Encoder:
    """Open an encoder over the bundle's executables. Raises ArtifactError or DeviceError if this host cannot run it."""
    try:
        kind = encoder_class(bundle.manifest.executor)
    except UnknownNameError as error:
        raise ArtifactError(
            f"{bundle.path}: {error}; upgrade llmc, or compile again: {bundle.recompile_hint}"
        ) from None
    kind.check(bundle)
    bundle.warn_if_exposed()
    encoder = kind(bundle, threads or bundle.settings.threads)
    warn_in_place_of(bundle, encoder.capabilities.in_place_of)
    return encoder
