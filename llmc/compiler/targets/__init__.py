"""Targets: one file per device that llmc compiles for; each is imported when its device is asked for.

Other packages bring theirs in the entry-point group "llmc.targets" (declared.py, docs/adding.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.compiler.targets.declared import TARGETS, require_device
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.compiler.targets.base import Target


def open_target(device: str, settings: Settings | None = None) -> Target:
    """The target for `device`, which may say more behind a colon ("tpu:v5e-2x2"); `settings`: the environment's.

    Raises UnknownNameError listing the known ones, and InputError for what a device cannot be told.
    """
    require_device(device)
    name, _, detail = device.partition(":")
    cls: type[Target] = TARGETS.get(name)
    settings = settings or Settings.from_environment()
    target = cls.of(detail, settings)
    target.settings = settings
    return target
