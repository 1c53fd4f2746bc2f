"""How XLA selects matmul kernels where it has no GPU to time them on.

Without help, XLA takes the first entry of a list: with jax 0.10.2 and an H100, tiles of 16 × 8, steps of 16 along the
sum, one stage and two warps for every matmul size (GetDefaultConfig in xla/backends/gpu/autotuner/triton.cc, 0c1ab89;
observed). Two things help: results of a GPU, looked up first, and XLA's own cost model, which orders the list
(`OptimizeConfigsWithCostModel`, xla/backends/gpu/autotuner/triton/cost_model_config_optimization.cc, 80c095f).

Both are passed without leaving a path in the executable: results under a name that XLA resolves with an environment
variable (tsl::io::ResolveTestPrefixes), the model by XLA_FLAGS, since PJRT takes no map options. XLA reads results and
flags once a process, so each executable is compiled in a process of its own.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llmc.artifacts.temporaries import temporary_folder
from llmc.runtime.executors.envelope import ExecutableFile, write_envelope
from llmc.runtime.executors.xla.envelope import FORM
from llmc.settings import variables

RESULTS_NAME = "llmc-tuning.pb"
FLAGS = "XLA_FLAGS"
_FOLDER = "TEST_UNDECLARED_OUTPUTS_DIR"
LOAD_RESULTS: Mapping[str, str] = {"xla_gpu_load_autotune_results_from": f"{_FOLDER}/{RESULTS_NAME}"}
COST_MODEL = "--xla_gpu_experimental_cost_model_gemm_tiling_options=filter=0"
"""Selects the configuration of the default list that the cost model ranks fastest."""

_REPORTED = {"TF_CPP_VMODULE": "autotuner_cache=1", "TF_CPP_MIN_LOG_LEVEL": "0"}
"""Makes XLA log a line for each matmul that it looks up (AutotunerCache::TryFindInCache)."""

_MEMBER = "products"
_LINE = re.compile(r"I\d{4} ")
_HIT = re.compile(r"\] (In-memory|File-based) autotune cache hit")
_MISS = re.compile(r"\] Autotune cache miss")


@dataclass
class Looked:
    """How many matmuls of one executable XLA looked up, identical ones counted once, and how many it found."""

    matmuls: int = 0
    tuned: int = 0


def noted(data: bytes, looked: Looked) -> bytes:
    """Add the header member "products", {"of": …, "tuned": …}, to executable file `data`.

    Returns `data` unchanged where XLA reported nothing.
    """
    if not looked.matmuls:
        return data
    parsed = ExecutableFile.parse(data, "an executable", FORM)
    members = {**parsed.header, _MEMBER: {"of": looked.matmuls, "tuned": looked.tuned}}
    return write_envelope(members, {name: bytes(parsed.section(name)) for name in parsed.names}, FORM)


def noted_in(files: Sequence[Path]) -> Looked | None:
    """Sum the matmul counts in the headers of executable files; None where no header has any."""
    headers = [ExecutableFile.parse(file.read_bytes(), str(file), FORM).header for file in files]
    found = [header[_MEMBER] for header in headers if _MEMBER in header]
    return Looked(sum(each["of"] for each in found), sum(each["tuned"] for each in found)) if found else None


@contextmanager
def choosing(results: bytes | None, *, model: bool) -> Iterator[tuple[Mapping[str, str], Looked]]:
    """Provide XLA's compile options, and the look-ups it reports, which are complete after the block.

    `results` are AutotuneResults, or None. With `model`, the cost model selects kernels for matmuls without a result.
    XLA's stderr passes through, except for the look-up lines.
    """
    looked = Looked()
    with temporary_folder("products") as folder:
        if results is not None:
            (Path(folder) / RESULTS_NAME).write_bytes(results)
        flags = " ".join(filter(None, (variables((FLAGS,)).get(FLAGS), COST_MODEL if model else "")))
        with _environment({**_REPORTED, _FOLDER: str(folder), FLAGS: flags}), _counting(looked):
            yield (LOAD_RESULTS if results is not None else {}), looked


@contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    before = variables(wanted)
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted:
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _counting(looked: Looked) -> Iterator[None]:
    """Capture C++ stderr, count look-up lines, and pass the others on."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as taken:
        os.dup2(taken.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            taken.seek(0)
            for line in taken.read().decode(errors="replace").splitlines(keepends=True):
                looked.tuned += bool(_HIT.search(line))
                looked.matmuls += bool(_HIT.search(line) or _MISS.search(line))
                if line.strip() and not _LINE.match(line):
                    os.write(2, line.encode())
