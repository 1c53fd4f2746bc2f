"""Finishing portable models on the host of the GPU or NPU: each is compiled there, and keeps its portable model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from llmc.compiler.targets.finishing import EachExecutable
from llmc.compiler.targets.openvino.ahead import compiler_for, is_here, lacking
from llmc.errors import DeviceError
from llmc.runtime.executors import open_executor

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest_schema import Executable
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.base import Executor


class _DeviceFinisher(EachExecutable):
    """For `device`, "GPU", "GPU.1", "NPU" or "NPU.4000"."""

    reads: ClassVar[tuple[str, ...]] = ("weights",)

    def __init__(self, device: str) -> None:
        self.device = device

    def lacks(self) -> str:
        """The device, or its driver."""
        if is_here(self.device):
            return lacking(self.device)
        return f"OpenVINO finds no {self.device} on this host; install its driver, or finish on a host that has one"

    def finish(self, bundle: Bundle, executable: Executable) -> bytes:
        """As ahead.py compiles it here."""
        from llmc.runtime.executors.openvino.device import MappedWeights

        compiler = compiler_for(self.device)
        if compiler is None:
            raise DeviceError(f"{bundle.path}: cannot be finished here: this host lacks {lacking(self.device)}")
        return compiler.compile(bundle.files.read(executable.blob), MappedWeights(bundle.files.path("weights")))

    def open_portable(self, bundle: Bundle) -> Executor:
        """On the CPU, though the device is here."""
        from llmc.runtime.bundle import Bundle

        return open_executor(Bundle(bundle.files, replace(bundle.settings, open_portable=True)))


class GpuFinisher(_DeviceFinisher):
    """See the module's docstring."""

    executor: ClassVar[str] = "openvino-gpu"


class NpuFinisher(_DeviceFinisher):
    """See the module's docstring."""

    executor: ClassVar[str] = "openvino-npu"
