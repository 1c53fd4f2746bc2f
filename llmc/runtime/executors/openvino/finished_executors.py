"""Bundles that were finished on the host of a GPU or an NPU: models of one shape that its plugin imports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from llmc.runtime.executors.base import EXECUTABLES, Content
from llmc.runtime.executors.openvino.plugins import host_of
from llmc.runtime.executors.openvino.static_executor import OpenVinoStaticExecutor


class OpenVinoGpuExecutor(OpenVinoStaticExecutor):
    """On the GPUs, and with the driver, that its models were finished for."""

    name: ClassVar[str] = "openvino-gpu"
    opens: ClassVar[Mapping[str, Content]] = {"weights": "data", EXECUTABLES: "code"}

    @classmethod
    def host(cls) -> Mapping[str, str]:
        """OpenVINO's version, architecture and driver."""
        return host_of("GPU")


class OpenVinoNpuExecutor(OpenVinoStaticExecutor):
    """On an NPU of the platform, and with the driver, that its models were finished for."""

    name: ClassVar[str] = "openvino-npu"
    opens: ClassVar[Mapping[str, Content]] = {"weights": "data", EXECUTABLES: "code"}

    @classmethod
    def host(cls) -> Mapping[str, str]:
        """OpenVINO's version, platform and driver."""
        return host_of("NPU")
