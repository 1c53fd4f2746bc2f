"""Executors without a cache, by name; each is imported when a bundle names it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.errors import ArtifactError, UnknownNameError
from llmc.platforms import not_installed
from llmc.registry import Registry
from llmc.runtime.executors.compatibility import warn_in_place_of

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.encoders.base import Encoder

ENCODERS = Registry(
    "encoder",
    "llmc.encoders",
    {
        "fake-encoder": "llmc.runtime.executors.fake.encoder:FakeEncoder",
        "onnxruntime-encoder": "llmc.runtime.executors.onnxruntime.encoder:OnnxRuntimeEncoder",
        "openvino-encoder": "llmc.runtime.executors.openvino.encoder:OpenVinoEncoder",
        "xla-encoder": "llmc.runtime.executors.xla.encoder:XlaEncoder",
    },
)


def encoder_class(name: str) -> type[Encoder]:
    """The encoder called `name`. Raises UnknownNameError, and DeviceError where what it runs on is not installed."""
    try:
        found: type[Encoder] = ENCODERS.get(name)
    except ModuleNotFoundError as error:
        if (told := not_installed(error)) is None:
            raise
        raise told from error
    return found


def open_encoder(bundle: Bundle, threads: int | None = None) -> Encoder:
    """An encoder over the bundle's executables. Raises ArtifactError or DeviceError when this host cannot run it."""
    try:
        kind = encoder_class(bundle.manifest.executor)
    except UnknownNameError as error:
        raise ArtifactError(
            f"{bundle.path}: {error}; upgrade llmc, or compile again: {bundle.recompile_hint}"
        ) from None
    kind.check(bundle)
    bundle.warn_if_exposed()
    encoder = kind(bundle, threads or bundle.settings.threads)
    warn_in_place_of(bundle, encoder.in_place_of)
    return encoder
