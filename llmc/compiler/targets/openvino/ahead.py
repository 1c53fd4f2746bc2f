"""GPU and NPU compilers: which one this host has, and what it lacks.

    NPU   Intel's NPU compiler, next to OpenVINO's plugins, compiles for a named platform on any host (NPU_PLATFORM with
          NPU_COMPILER_TYPE=PLUGIN); an installed NPU's driver has another compiler, for that NPU only
    GPU   the plugin compiles kernels with the driver of an installed GPU, and there is no other way

OpenVINO 2026.4.1's wheels have the NPU plugin without that compiler (openvino#36374). The plugin looks for
libopenvino_intel_npu_compiler_loader.so in its own folder (src/plugins/intel_npu, vcl_api.cpp), which opens
libopenvino_intel_npu_compiler.so next to it; Intel's archives of OpenVINO have both (openvino#33129). Its output for a
platform runs with every driver released for that platform, except for 3720, whose older drivers refuse it
(src/plugins/intel_npu/README.md of 08d1b43): for an NPU 3720, its own driver compiles.

The finishers compile portable models on the host of the GPU or NPU; each result keeps its portable model.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from llmc.artifacts.digest import digest_file
from llmc.compiler.targets.on_target import EachExecutable
from llmc.errors import CompileError, DeviceError

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest_schema import Executable
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.openvino.device import MappedWeights

LIBRARIES = ("openvino_intel_npu_compiler_loader", "openvino_intel_npu_compiler")
OWN_DRIVER_ONLY = "3720"
_NODES = {"NPU": ("accel/accel*",), "GPU": ("dri/renderD*", "dxg")}
DEV = Path("/dev")


@dataclass(frozen=True)
class DeviceCompiler:
    """How this host compiles for `device`, as compile_model takes it.

    It has OpenVINO's `properties`, the compiler's key components, and what the result is tied to
    (runtime/executors/openvino/device.py).
    """

    device: str
    properties: Mapping[str, str]
    toolchain: Mapping[str, str]
    built_for: Mapping[str, str]

    def compile(self, ir: bytes, weights: MappedWeights) -> bytes:
        """Compile a model of fixed sizes to a file in the format of blobs.py.

        Raises CompileError with OpenVINO's reason where its plugin refuses the model, or cannot export it.
        """
        from llmc.runtime.executors.openvino.blobs import DeviceBlob, reason_of
        from llmc.runtime.executors.openvino.device import kind_of, open_core, version

        try:
            model = open_core().read_model(ir, weights.tensor)
            stream: Any = open_core().compile_model(model, self.device, dict(self.properties)).export_model()
        except RuntimeError as e:
            raise CompileError(f"OpenVINO {version()} cannot compile for {self.device}: {reason_of(e)}") from e
        return DeviceBlob(kind_of(self.device), self.built_for, ir, stream.getvalue()).to_bytes()


def compiler_for(device: str) -> DeviceCompiler | None:
    """Find the compiler for "GPU", "GPU.1", "NPU" (the installed one) or "NPU.4000"; None where this host has none.

    OpenVINO is imported only where /dev has a node of such a device, so that `llmc devices` is quick.
    """
    kind, _, platform = device.partition(".")
    here = _facts_here(device)
    if kind == "GPU":
        return None if here is None else DeviceCompiler(device, {}, _named(here), here)
    wanted = platform or (here or {}).get("platform", "")
    library = npu_compiler()
    if library is not None and wanted not in ("", OWN_DRIVER_ONLY):
        requested = {"NPU_COMPILER_TYPE": "PLUGIN", "NPU_PLATFORM": wanted}
        toolchain = {"npu_platform": wanted, "npu_compiler": _digest(library)}
        return DeviceCompiler("NPU", requested, toolchain, {"platform": wanted})
    if here is not None and here.get("platform", "") == wanted:
        return DeviceCompiler("NPU", {}, _named(here), here)
    return None


def lacking(device: str) -> str:
    """Describe what this host lacks to compile for `device`; "" where it lacks nothing."""
    kind, _, platform = device.partition(".")
    if compiler_for(device) is not None:
        return ""
    if kind == "GPU":
        return f"a {device} that OpenVINO finds, with its OpenCL driver (intel-opencl-icd)"
    if platform == OWN_DRIVER_ONLY:
        return "an NPU 3720 with its driver: it takes what the compiler in its own driver makes"
    if npu_compiler() is None:
        return (
            f"{library_name(LIBRARIES[0])} and {library_name(LIBRARIES[1])} next to OpenVINO's plugins: Intel's "
            "archives of OpenVINO have them, its wheels for Linux do not (openvino#36374)"
        )
    return "the NPU's platform, since no NPU is here: --device openvino:NPU.4000, NPU.5010, NPU.5020 or NPU.6010"


def is_here(device: str) -> bool:
    """Whether OpenVINO finds the device on this host, with the platform that its name states."""
    found = _facts_here(device)
    kind, _, detail = device.partition(".")
    return found is not None and (kind == "GPU" or detail in ("", found.get("platform")))


def npu_compiler() -> Path | None:
    """Find Intel's NPU compiler with its loader in OpenVINO's plugin folder, without importing either."""
    folder = _folder()
    if folder is None:
        return None
    paths = [folder / library_name(name) for name in LIBRARIES]
    return paths[-1] if all(path.is_file() for path in paths) else None


def library_name(name: str) -> str:
    """Return the file name of a shared library on this system."""
    return f"{name}.dll" if sys.platform == "win32" else f"lib{name}.so"


def _folder() -> Path | None:
    found = find_spec("openvino")
    return None if found is None or found.origin is None else Path(found.origin).parent / "libs"


def _facts_here(device: str) -> dict[str, str] | None:
    """Facts of the installed device; None if absent."""
    kind = device.partition(".")[0]
    if not any(True for pattern in _NODES[kind] for _ in DEV.glob(pattern)) or find_spec("openvino") is None:
        return None
    from llmc.runtime.executors.openvino.device import facts_here, has_device, plugin_name

    return facts_here(device) if has_device(plugin_name(device)) else None


def _named(facts: Mapping[str, str]) -> dict[str, str]:
    return {f"device_{name.replace(' ', '_')}": value for name, value in facts.items()}


@cache
def _digest(library: Path) -> str:
    return digest_file(library)


class _BlobCompiler(EachExecutable):
    """Compiles for `device`, "GPU", "GPU.1", "NPU" or "NPU.4000"."""

    reads: ClassVar[tuple[str, ...]] = ("weights",)

    def __init__(self, device: str) -> None:
        self.device = device

    def lacks(self) -> str:
        if is_here(self.device):
            return lacking(self.device)
        return f"OpenVINO finds no {self.device} on this host; install its driver, or compile on a host that has one"

    def compile(self, bundle: Bundle, executable: Executable) -> bytes:
        from llmc.runtime.executors.openvino.device import MappedWeights

        compiler = compiler_for(self.device)
        if compiler is None:
            raise DeviceError(f"{bundle.path}: cannot be compiled here: this host lacks {lacking(self.device)}")
        return compiler.compile(bundle.files.read(executable.blob), MappedWeights(bundle.files.path("weights")))


class GpuBlobCompiler(_BlobCompiler):
    """Compiles for GPUs."""

    executor: ClassVar[str] = "openvino-gpu"


class NpuBlobCompiler(_BlobCompiler):
    """Compiles for NPUs."""

    executor: ClassVar[str] = "openvino-npu"
