"""Targets: one file per device that llmc compiles for; each is imported when its device is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from llmc.errors import UnknownNameError

if TYPE_CHECKING:
    from llmc.compiler.targets.base import Target

_CLASSES = {
    "cpu": "llmc.compiler.targets.cpu:CpuTarget",
    "hpu": "llmc.compiler.targets.hpu:HpuTarget",
    "fake": "llmc.compiler.targets.fake:FakeTarget",
}


def devices() -> list[str]:
    """Names that --device takes."""
    return sorted(_CLASSES)


def open_target(device: str) -> Target:
    """The target for `device`; raises UnknownNameError listing the known ones."""
    if device not in _CLASSES:
        raise UnknownNameError("device", device, _CLASSES)
    module, attribute = _CLASSES[device].split(":")
    cls: type[Target] = getattr(import_module(module), attribute)
    return cls()
