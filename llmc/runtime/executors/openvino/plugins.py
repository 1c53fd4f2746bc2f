"""The GPU and NPU that OpenVINO's plugins find here, by the names that `--device openvino:…` takes.

    name     = "CPU" | "GPU" [ "." index ] | "NPU" [ "." platform ]        GPU.1, NPU.4000: OpenVINO's own names

OpenVINO reads what stands behind "NPU." as the platform that is compiled for (src/plugins/intel_npu: DEVICE_ID and
NPU_PLATFORM), and finds at most one NPU in a host.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from llmc.runtime.executors.openvino.device import open_core, version

_FACTS: Mapping[str, Mapping[str, str]] = MappingProxyType({
    "GPU": {
        "architecture": "DEVICE_ARCHITECTURE",
        "execution units": "GPU_EXECUTION_UNITS_COUNT",
        "driver": "GPU_DRIVER_VERSION",
    },
    "NPU": {"platform": "DEVICE_ARCHITECTURE", "driver": "NPU_DRIVER_VERSION"},
})  # fmt: skip
"""What a compiled model of a device depends on, and the property that states it: those that OpenVINO's own cache keys
name (GPU: src/plugins/intel_gpu/src/plugin/plugin.cpp, caching properties)."""


def kind_of(device: str) -> str:
    """CPU, GPU or NPU."""
    return device.partition(".")[0]


def plugin_name(device: str) -> str:
    """What OpenVINO takes for a device of this host: an NPU without its platform."""
    return "NPU" if kind_of(device) == "NPU" else device


def facts_here(device: str) -> dict[str, str]:
    """What the device of this host is, as far as its plugin says: what a compiled model depends on."""
    found = {}
    for name, wanted in _FACTS.get(kind_of(device), {}).items():
        try:
            found[name] = str(open_core().get_property(plugin_name(device), wanted))
        except RuntimeError:
            continue
    return found


def host_of(kind: str) -> dict[str, str]:
    """What models finished for the GPUs or the NPU of this host are tied to; empty where there is none."""
    found: dict[str, str] = {}
    for device in open_core().available_devices:
        if kind_of(device) == kind:
            of = "" if device in (kind, f"{kind}.0") else f"{device} "
            found |= {f"{of}{name}": value for name, value in facts_here(device).items()}
    return {"openvino": version(), **found} if found else {}
