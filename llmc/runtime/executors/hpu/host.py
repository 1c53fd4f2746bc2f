"""What recipes are tied to on a Gaudi host, without opening its card.

The card's code name is in sysfs (torvalds/linux, Documentation/ABI/testing/sysfs-driver-habanalabs: device_type, below
/sys/class/accel/accel<n>/device since 6.3, before below /sys/class/habanalabs/hl<n>), the driver's version is that of
its kernel module, and Synapse's is that of the Python plug-in, which is released with it. Recipes of one mode are of no
use in another (modes.py): lazy graphs are cut elsewhere than compiled ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from llmc.runtime import accelerators
from llmc.runtime.executors.hpu.modes import Mode
from llmc.settings import Settings

PLUGIN = "habana-torch-plugin"
_TYPES = ("sys/class/accel/accel*/device/device_type", "sys/class/habanalabs/hl*/device_type")
_DRIVER = "sys/module/habanalabs/version"


def host(settings: Settings | None = None) -> Mapping[str, str]:
    """Card, driver, Synapse and mode by name; empty on a host without a Gaudi card or without its software."""
    cards = sorted({text for pattern in _TYPES for path in accelerators.ROOT.glob(pattern) if (text := _text(path))})
    try:
        synapse = version(PLUGIN)
    except PackageNotFoundError:
        return {}
    if not cards:
        return {}
    return {
        "card": " ".join(cards),
        "driver": _text(accelerators.ROOT / _DRIVER) or "unknown",
        "synapse": synapse,
        "mode": str(Mode.of(settings or Settings.from_environment())),
    }


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""
