"""OpenVINO's core on a host with an NPU, a GPU, or Intel's NPU compiler, none of which is here: to contract-test with.

What the real one says was read off openvino 2026.4.1 without a device (compile_model and import_model for "NPU"), and
off src/plugins/intel_npu of openvinotoolkit/openvino (README.md of 08d1b43: platforms, properties, static shapes only;
plugin_property_manager.cpp: "Unsupported configuration key"). A blob is an ELF file's first bytes, the platform and the
whole model; it runs on the CPU plugin, so that numbers are proven.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

ELF = b"\x7fELF"
PLATFORMS = ("3720", "4000", "5010", "5020", "6010")
KNOWN = {"NPU_COMPILER_TYPE", "NPU_PLATFORM"}
NO_LIBRARY = (
    "Exception from src/inference/src/cpp/core.cpp:117:\nException from src/inference/src/dev/plugin.cpp:54:\n"
    "VCL compiler loading failed, aborting. Error: Exception from src/plugins/intel_npu/src/utils/src/vcl/vcl_api.cpp\n"
    'Cannot load library "libopenvino_intel_npu_compiler_loader.so": cannot open shared object file\n\n'
)
NO_DEVICE = "Could not find an NPU device. The driver compiler requires a valid device to be present in the system."
NO_BACKEND = "Could not import the model:Check '_backend != nullptr' failed\nNo backend registered during model import"
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0", "INFERENCE_NUM_THREADS": 1}


@dataclass
class FakeCore:
    """The core of a host: `npu` is the platform of its NPU, `gpu` the driver of its GPU, None: there is none."""

    npu: str | None = None
    npu_driver: str = "1711"
    gpu: str | None = None
    library: bool = False
    compiled: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._real = ov.Core()
        self._real.get_versions("CPU")

    @property
    def available_devices(self) -> list[str]:
        return ["CPU", *(["GPU"] if self.gpu else []), *(["NPU"] if self.npu else [])]

    def get_property(self, device: str, name: str) -> Any:
        known = {
            ("NPU", "DEVICE_ARCHITECTURE"): self.npu,
            ("NPU", "NPU_DRIVER_VERSION"): self.npu and self.npu_driver,
            ("GPU", "DEVICE_ARCHITECTURE"): self.gpu and "GPU: vendor=0x8086 arch=v20.1.0",
            ("GPU", "GPU_DRIVER_VERSION"): self.gpu,
        }
        if known.get((device, name)) is None:
            raise RuntimeError(f"Unsupported configuration key: {name}")
        return known[device, name]

    def read_model(self, *given: Any) -> ov.Model:
        return self._real.read_model(*given)

    def compile_model(self, model: ov.Model, device: str, config: Mapping[str, Any]) -> Any:
        if device == "CPU":
            return self._real.compile_model(model, device, dict(config))
        self.compiled.append((device, dict(config)))
        if device == "GPU" and self.gpu:
            return _Compiled(model, {"gpu": self.gpu})
        if device != "NPU":
            raise RuntimeError(f'Exception from core.cpp:117:\nDevice with "{device}" name is not registered')
        if unknown := set(config) - KNOWN:
            raise RuntimeError(f"Unsupported configuration key: {min(unknown)}")
        kind, platform = config.get("NPU_COMPILER_TYPE", "PREFER_PLUGIN"), config.get("NPU_PLATFORM", self.npu)
        if kind != "DRIVER" and not self.library and (kind == "PLUGIN" or self.npu is None):
            raise RuntimeError(NO_LIBRARY)
        if kind == "DRIVER" and self.npu is None:
            raise RuntimeError(NO_DEVICE)
        if platform not in PLATFORMS:
            raise RuntimeError(f"Invalid value '{platform}' for NPU_PLATFORM")
        if model.is_dynamic():
            raise RuntimeError("Exception from plugin.cpp:9:\nto_shape was called on a dynamic shape.")
        return _Compiled(model, {"platform": platform})

    def import_model(self, stream: io.BytesIO, device: str, config: Mapping[str, Any]) -> ov.CompiledModel:
        if device == "CPU":
            return self._real.import_model(stream, device, dict(config))
        data = stream.getvalue()
        if device == "NPU" and self.npu is None:
            raise RuntimeError(NO_BACKEND)
        if not data.startswith(ELF):
            raise RuntimeError("The blob is missing the NPU metadata!")
        header, _, rest = data[len(ELF) :].partition(b"\n")
        reported = json.loads(header)
        if reported["facts"] != ({"platform": self.npu} if device == "NPU" else {"gpu": self.gpu}):
            raise RuntimeError("L0 pfnCreate2 result: ZE_RESULT_ERROR_UNSUPPORTED_FEATURE")
        xml, weights = rest[: reported["xml"]], rest[reported["xml"] :]
        model = self._real.read_model(xml, ov.Tensor(np.frombuffer(weights, np.uint8).copy()))
        return self._real.compile_model(model, "CPU", EXACT)


class _Compiled:
    def __init__(self, model: ov.Model, facts: dict[str, Any]) -> None:
        self._model, self._facts = model, facts

    def export_model(self) -> io.BytesIO:
        with tempfile.TemporaryDirectory() as folder:
            xml, weights = Path(folder) / "m.xml", Path(folder) / "m.bin"
            ov.serialize(self._model, xml, weights)
            text = xml.read_bytes()
            header = json.dumps({"facts": self._facts, "xml": len(text)}).encode()
            return io.BytesIO(ELF + header + b"\n" + text + weights.read_bytes())
