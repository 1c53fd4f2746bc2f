"""Single operators of kernels for CPUs of another machine, without ONNX Runtime: a program around the same sources
(host_program/host.c), in qemu's user-mode emulation (Debian: qemu-user) over that machine's C library (Debian:
libc6-arm64-cross)."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.artifacts.bundle.kernel_sets import KernelSet
from llmc.compiler.targets.onnxruntime.kernels import build
from tests.compiler.targets.onnxruntime.kernels.single import KINDS, Arrays

HOST = Path(__file__).parent / "host_program" / "host.c"
CPUS = {"neon-i8mm": "max", "neon-dotprod": "neoverse-n1"}
"""What qemu emulates for each set: of CPUs that have what it needs, the one with the least."""


class Standalone:
    """The kernels of one set, in a program that qemu runs."""

    def __init__(self, folder: Path, kernels: KernelSet) -> None:
        machine = kernels.machine
        qemu = shutil.which(f"qemu-{machine}")
        if qemu is None:
            pytest.skip("no emulator of this machine: apt-get install qemu-user")
        libraries = Path(f"/usr/{machine}-linux-gnu")
        if not libraries.is_dir():
            pytest.skip("no C library of this machine: apt-get install libc6-arm64-cross")
        program = folder / "host"
        sources = sorted(path.name for path in build.SOURCE.glob("*.c"))
        built = build.zig(
            ("cc", *build.TARGETS[kernels.name], "-std=gnu11", "-O3", "-I", ".", *sources, str(HOST), "-lm", "-o",
             str(program)), folder,
        )  # fmt: skip
        assert built.returncode == 0, built.stderr
        self._command = [qemu, "-L", str(libraries), "-cpu", CPUS[kernels.name], str(program)]

    @contextmanager
    def team(self, threads: int) -> Iterator[None]:
        """Operators run on so many threads."""
        self._command.append(str(threads))
        try:
            yield
        finally:
            self._command.pop()

    def run(
        self, op: str, given: list[tuple[str, NDArray[Any] | None]], outputs: list[str], attrs: dict[str, Any]
    ) -> Arrays:
        """As single.run; raises RuntimeError with what the operator says."""
        reported = [_text(op.encode()), _number(len(attrs))]
        for name, value in attrs.items():
            real = isinstance(value, float)
            reported += [
                _text(name.encode()),
                _number(int(real)),
                struct.pack("<f4x", value) if real else _number(value),
            ]
        reported.append(_number(len(given)))
        for _, array in given:
            if array is None:
                reported.append(_number(0))
                continue
            reported += [_number(1), _number(array.ndim), *map(_number, array.shape), _text(array.tobytes())]
        reported.append(_number(len(outputs)))
        ran = subprocess.run(self._command, input=b"".join(reported), capture_output=True, timeout=120, check=True)
        return _read(ran.stdout, outputs)


def _number(x: int) -> bytes:
    return struct.pack("<q", x)


def _text(x: bytes) -> bytes:
    return _number(len(x)) + x


def _read(reported: bytes, outputs: list[str]) -> Arrays:
    at, found = 0, {}

    def number() -> int:
        nonlocal at
        at += 8
        return int(struct.unpack_from("<q", reported, at - 8)[0])

    for output in outputs:
        rank = number()
        if rank < 0:
            raise RuntimeError(reported[at + 8 :].decode())
        dims = [number() for _ in range(rank)]
        size = number()
        if not output.startswith("-"):
            kind = KINDS.get(output, "float32")
            found[output] = np.frombuffer(reported[at : at + size], kind).reshape(dims)
        at += size
    return found
