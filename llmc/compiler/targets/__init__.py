"""Targets: one module per device that llmc compiles for, imported on first use.

Other packages register targets in the entry-point group "llmc.targets" (declared.py, docs/adding.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.compiler.targets.declared import TARGETS, require_device
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.compiler.targets.base import Target


def open_target(device: str, settings: Settings | None = None) -> Target:
    """Open the target for `device`, which may carry a detail behind a colon ("tpu:v5e-2x2").

    `settings` defaults to the environment's. Raises UnknownNameError, which lists the known devices, and InputError for
    an invalid detail.
    """
    require_device(device)
    name, _, detail = device.partition(":")
    cls: type[Target] = TARGETS.get(name)
    settings = settings or Settings.from_environment()
    target = cls.of(detail, settings)
    target.settings = settings
    return target
