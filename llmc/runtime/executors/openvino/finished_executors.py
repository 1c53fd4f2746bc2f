"""Bundles that were finished on the host of a GPU or an NPU: models of one shape that its plugin imports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from llmc.runtime.executors.base import EXECUTABLES, Content
from llmc.runtime.executors.openvino.plugins import host_of
from llmc.runtime.executors.openvino.static_executor import OpenVinoStaticExecutor


class _FinishedExecutor(OpenVinoStaticExecutor):
    """On the device, and with the driver, that its models were finished for."""

    opens: ClassVar[Mapping[str, Content]] = {"weights": "data", EXECUTABLES: "code"}
    plugin: ClassVar[str]
    """OpenVINO's name of the device."""

    @classmethod
    def host(cls) -> Mapping[str, str]:
        """OpenVINO's version, the device's architecture or platform, and its driver."""
        return host_of(cls.plugin)


class OpenVinoGpuExecutor(_FinishedExecutor):
    """On GPUs."""

    name: ClassVar[str] = "openvino-gpu"
    plugin: ClassVar[str] = "GPU"


class OpenVinoNpuExecutor(_FinishedExecutor):
    """On NPUs of one platform."""

    name: ClassVar[str] = "openvino-npu"
    plugin: ClassVar[str] = "NPU"
