"""Targets for models without a cache, by the names of devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.errors import InputError, UnknownNameError
from llmc.registry import Registry

if TYPE_CHECKING:
    from llmc.compiler.targets.encoders.base import EncoderTarget

TARGETS = Registry(
    "device for embedding and scoring",
    "llmc.encoder_targets",
    {
        "fake": "llmc.compiler.targets.encoders.fake:FakeEncoderTarget",
        "onnxruntime": "llmc.compiler.targets.encoders.onnxruntime:OnnxRuntimeEncoderTarget",
        "openvino": "llmc.compiler.targets.encoders.openvino:OpenVinoEncoderTarget",
        "tpu": "llmc.compiler.targets.encoders.xla:TpuEncoderTarget",
        "xla": "llmc.compiler.targets.encoders.xla:XlaEncoderTarget",
    },
    untold=("fake",),
)
CPU, ENGINES = "cpu", ("openvino", "onnxruntime")
"""What `--device cpu` stands for: the first of these that is installed."""


def open_encoder_target(device: str) -> tuple[EncoderTarget, str]:
    """The target that `device` stands for, and why.

    Raises InputError for a device that has no form for models without a cache.
    """
    name, _, detail = device.partition(":")
    if name != CPU:
        return _named(name, device).of(detail), ""
    targets = [(_named(engine, device), engine) for engine in ENGINES]
    target, engine = next((found for found in targets if not found[0].missing()), targets[0])
    why = "the first of the runtimes of CPUs for models without a cache"
    if engine != ENGINES[0]:
        why = f"{targets[0][0].missing()} is not installed here"
    return target.of(detail), f"{engine}: {why}"


def encoder_target(name: str) -> EncoderTarget:
    """The target of that name, as manifests have it. Raises UnknownNameError."""
    made: EncoderTarget = TARGETS.get(name)()
    return made


def _named(name: str, device: str) -> type[EncoderTarget]:
    try:
        found: type[EncoderTarget] = TARGETS.get(name)
    except UnknownNameError:
        offered = ", ".join([CPU, *TARGETS.told()])
        raise InputError(
            f"--device {device} has no form for models that embed or score; take one of {offered}"
        ) from None
    return found
