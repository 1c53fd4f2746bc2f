"""XLA's client of NVIDIA GPUs, as an executor meets it: over the GPUs of the fake NVML, computing on this CPU.

What stands in is the deserialisation of machine code. An executable that `learn` was shown is the portable program of
the same file, compiled for the CPU; everything else is the executor's own. It refuses what the real one refuses, in its
words (openxla/xla of b7d5c51, read in jax-cuda13-pjrt 0.10.2 too):

    another compute capability   GpuExecutable::FromProto, xla/service/gpu/gpu_executable.cc
    bytes of no executable       "Serialized executable is from an incompatible PjRt client type", PJRT's own
    a client that does not open  jax/_src/xla_bridge.py (0.10.2): RuntimeError, "Unable to initialize backend 'cuda'"

What it cannot show: that machine code runs on a card, and how fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import jax
import pytest

from llmc.runtime.bundle import Bundle
from llmc.runtime.executors.envelope import ExecutableFile
from llmc.runtime.executors.xla import hosts
from llmc.runtime.executors.xla.client import open_client
from llmc.runtime.executors.xla.envelope import FORM, StepHeader
from llmc.runtime.executors.xla.hosts import CudaHost, needs_of
from llmc.runtime.executors.xla.programs import compile_exported
from llmc.runtime.executors.xla.slot_executor import SLOT_PROGRAMS
from llmc.runtime.nvidia import gpus


class FakeCudaHost(CudaHost):
    """Cards of a host with the plug-in; `refuses`: what the client says instead of opening."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.loaded = 0
        self._known: dict[bytes, tuple[tuple[int, int], Any]] = {}

    def learn(self, bundle: Bundle) -> None:
        """Know the machine code of a bundle. Its portable programs are compiled now, so that opening compiles none."""
        capability = needs_of(bundle).compute_capability
        assert capability is not None
        devices = open_client("cpu", bundle.option("tensor_parallel", 1), 1)
        for file in {*SLOT_PROGRAMS, *(e.blob for e in bundle.manifest.executables)}:
            envelope = ExecutableFile.parse(bundle.files.read(file), file, FORM)
            header = StepHeader.parse(envelope.header, file)
            built = compile_exported(envelope.section("export"), header, devices, file).runtime_executable()
            self._known[sha256(envelope.section("native")).digest()] = capability, built

    def open(self, devices: int, threads: int) -> list[Any]:
        if self.refuses:
            raise RuntimeError(f"Unable to initialize backend 'cuda': {self.refuses}")
        return open_client("cpu", devices, threads)

    def load(self, native: bytes, devices: Sequence[Any]) -> Any:
        found = self._known.get(sha256(native).digest())
        if found is None:
            raise jax.errors.JaxRuntimeError(
                "INVALID_ARGUMENT: Serialized executable is from an incompatible PjRt client type. PjRt client type "
                "expected by the serialized executable: se_gpu"
            )
        wanted, built = found
        here = gpus()[0].compute_capability
        if here != wanted:
            raise jax.errors.JaxRuntimeError(
                "INVALID_ARGUMENT: GPU compute capability of serialized executable doesn't match target device "
                f"capability. (serialized: {wanted[0]}.{wanted[1]}, target: {here[0]}.{here[1]})"
            )
        self.loaded += 1
        return built


def install(patch: pytest.MonkeyPatch, host: FakeCudaHost) -> None:
    """Let the table of hosts have this one until the test ends; GPUs are those of nvidia.install."""
    patch.setattr(hosts, "HOSTS", {**hosts.HOSTS, "cuda": host})
