"""Targets: one file per device that llmc compiles for; each is imported when its device is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from llmc.errors import UnknownNameError

if TYPE_CHECKING:
    from llmc.compiler.targets.base import Target

_CLASSES = {
    "cpu": "llmc.compiler.targets.cpu:CpuTarget",
    "onnxruntime": "llmc.compiler.targets.cpu:CpuTarget",
    "openvino": "llmc.compiler.targets.openvino:OpenVinoTarget",
    "hpu": "llmc.compiler.targets.hpu:HpuTarget",
    "xla": "llmc.compiler.targets.xla:XlaTarget",
    "tpu": "llmc.compiler.targets.tpu:TpuTarget",
    "fake": "llmc.compiler.targets.fake:FakeTarget",
}


def devices() -> list[str]:
    """Names that --device takes."""
    return sorted(_CLASSES)


def open_target(device: str) -> Target:
    """The target for `device`, which may say more behind a colon ("tpu:v5e-2x2").

    Raises UnknownNameError listing the known ones, and InputError for what a device cannot be told.
    """
    name, _, detail = device.partition(":")
    if name not in _CLASSES:
        raise UnknownNameError("device", device, _CLASSES)
    module, attribute = _CLASSES[name].split(":")
    cls: type[Target] = getattr(import_module(module), attribute)
    return cls.of(detail)
