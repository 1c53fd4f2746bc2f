"""Tiles of an x86-64 CPU, which a process may use that Linux allows it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.compiler.targets.onnxruntime.kernels import build
from tests.compiler.targets.onnxruntime.kernels import test_rounded_matmul
from tests.compiler.targets.onnxruntime.kernels.host import may_tile
from tests.compiler.targets.onnxruntime.kernels.test_linear import attributes, matrix
from tests.compiler.targets.onnxruntime.kernels.test_rounded_cache import ROUNDED

pytestmark = pytest.mark.full  # tiles are on few hosts; over AVX2 they are emulated (test_sets.py, test_emulated.py)

SIZE, ROWS = (96, 576, 32), 150
TOO_SMALL = """
import ctypes, resource

class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

libc = ctypes.CDLL(None, use_errno=True)
stack = ctypes.create_string_buffer(6000)  # for signals, which save no tiles in so few bytes: Linux refuses them
assert libc.sigaltstack(ctypes.byref(Stack(ctypes.addressof(stack), 0, 6000)), None) == 0
assert libc.syscall(158, 0x1023, 18) == -1, "tiles are allowed"
"""
"""What a process does that Linux refuses tiles."""


def matmul(library: Path, decoding: int = ROWS) -> NDArray[np.float32]:
    """Of more rows than one tile has."""
    held, _ = matrix(*SIZE, 8, False)
    x = np.random.default_rng(0).normal(0, 1, (ROWS, SIZE[1])).astype(np.float32)
    return test_rounded_matmul.matmul(library, x, held["panels"], attributes(*SIZE, 8, 0), decoding=decoding)


def prompts(library: Path) -> NDArray[np.float32]:
    """The same in bfloat16."""
    return matmul(library, decoding=0)


def attention(library: Path) -> NDArray[np.float32]:
    """In bfloat16, of more rows than one tile has."""
    case = ROUNDED["rows of several tiles"]
    built: NDArray[np.float32] = case.run(library, case.inputs())["y"]
    return built


@pytest.mark.full
@pytest.mark.parametrize("built", [matmul, prompts, attention], ids=lambda built: built.__name__)
def test_where_tiles_are_refused_the_same_bits_are_built_without(
    tmp_path: Path, built: Callable[[Path], NDArray[np.float32]]
) -> None:
    if not may_tile():
        pytest.skip("this CPU, or its system, has no tiles")
    library = build.build(tmp_path, "amx-int8")
    call = f"{built.__name__}(Path({str(library)!r})).tofile({str(tmp_path / 'y')!r})"
    code = f"{TOO_SMALL}\nfrom {__name__} import *\n{call}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "y").read_bytes() == built(library).tobytes()
