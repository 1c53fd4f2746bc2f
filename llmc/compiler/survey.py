"""What this host can compile for and run on, found without importing any toolchain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

from llmc.compiler.targets import devices, open_target
from llmc.compiler.targets.base import Target
from llmc.compiler.xla.topology import known, shown
from llmc.platforms import exists_here
from llmc.runtime.xla.client import has_tpu

HIDDEN = ("fake",)
_RUN_INSTALL = {
    "onnxruntime": "onnxruntime", "torch": "'llmc[compile]'", "jax": "'llmc[xla]'", "openvino": "'llmc[openvino]'",
}  # fmt: skip
_SLICES = "tpu"
"""The device that takes a slice behind its name."""


def survey() -> list[dict[str, Any]]:
    """A row for each device: compiles, runs ("yes" or what is missing), state of its executables here, a note, and the
    topologies that it takes behind its name (see `topologies`), none for most."""
    rows = []
    for name in devices():
        if name in HIDDEN:
            continue
        target = open_target(name)
        missing = _missing(target.compile_needs)
        rows.append(
            {
                "device": name,
                "compiles": _lack(missing, target.install, f" (missing {', '.join(missing)})") if missing else "yes",
                "runs": _runs(target),
                "state": target.state,
                "note": target.remaining(),
                "topologies": topologies() if name == _SLICES else [],
            }
        )
    return rows


def topologies() -> list[dict[str, Any]]:
    """Every TPU slice: name, generation, shape, chips, devices, hosts, and what programs may take of a device."""
    return [
        {
            "name": topology.name,
            "generation": topology.generation,
            "shape": shown(topology.shape),
            "chips": topology.chips,
            "devices": topology.devices,
            "hosts": topology.hosts,
            "hbm_bytes_per_device": topology.hbm_bytes_per_device,
        }
        for topology in known()
    ]


def _runs(target: Target) -> str:
    if missing := _missing(target.run_needs):
        return _lack(missing, f"pip install {' '.join(_RUN_INSTALL[package] for package in missing)}", "")
    if target.name == _SLICES and not has_tpu():
        return "no: needs a TPU host"
    return "yes" if target.state == "native" else "on CPU, portable"


def _lack(missing: Sequence[str], install: str, why: str) -> str:
    absent = [package for package in missing if not exists_here(package)]
    return f"no: {absent[-1]} has no build for this platform" if absent else f"no: {install}{why}"


def _missing(packages: Iterable[str]) -> list[str]:
    return [package for package in packages if find_spec(package) is None]
