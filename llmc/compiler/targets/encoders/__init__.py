"""Targets for models without a cache, by the names of devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.errors import InputError
from llmc.registry import Registry

if TYPE_CHECKING:
    from llmc.compiler.targets.encoders.base import EncoderTarget

TARGETS = Registry(
    "device for embedding and scoring",
    "llmc.encoder_targets",
    {
        "openvino": "llmc.compiler.targets.encoders.openvino:OpenVinoEncoderTarget",
    },
)
CPU = "cpu"


def open_encoder_target(device: str) -> tuple[EncoderTarget, str]:
    """The target that `device` stands for, and why: for "cpu" OpenVINO.

    Raises InputError for a device that has no form for models without a cache.
    """
    name, _, detail = device.partition(":")
    if detail and device.lower() != "openvino:cpu":
        raise InputError(f"--device {device}: models that embed or score run on a CPU; use --device cpu or openvino")
    why = ""
    if name == CPU:
        name, why = "openvino", "openvino: the runtime of CPUs that has a form for models without a cache"
    target: EncoderTarget = TARGETS.get(name)()
    return target, why
