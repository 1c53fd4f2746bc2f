"""Compiles one step with AOTInductor in a process of its own, because Inductor compiles one graph at a time.

    python -m llmc.compiler.targets.inductor.compiling FOLDER

    FOLDER/program.pt2    the portable program
    FOLDER/job.json       {"device": "cuda" | "cpu", "sizes": {…} (runtime/executors/inductor/package.py),
                          "cache": [{…}, …] (runtime/executors/whole_step/cache.py),
                          "weights": {name: [[size, …], dtype]}, "configs": {name: value} of torch._inductor.config}
    FOLDER/package.pt2    the result, in the format of the executor's package.py

The step is whole_step's `flat_step`: it updates the given cache in place, and takes its weights as inputs. The cache's
slot count stays dynamic, since memory decides it where the package runs. Only weight shapes are needed: all weights of
one dtype are views of one tensor, as large as the largest.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.errors import CompileError, LlmcError
from llmc.runtime.executors.inductor.package import tidied
from llmc.runtime.executors.whole_step.cache import DTYPES, AcceleratorArray, lengths_of
from llmc.runtime.executors.whole_step.step_program import Run, flat_step
from llmc.runtime.portable_program import PortableProgram

if TYPE_CHECKING:
    from torch import Tensor

JOB, GIVEN, LEFT = "job.json", "program.pt2", "package.pt2"
MOST_SLOTS = 1 << 20
EXAMPLE_SLOTS = 3
"""Not 1, which torch.export would specialise on."""

ENVIRONMENT = {"AOT_INDUCTOR_ENABLE_LINE_TABLES": "0"}
"""Leaves out the debug information that torch 2.13 adds, half of a package."""


def compile_step(program: PortableProgram, job: Mapping[str, Any], output: Path) -> None:
    """Write the package of a step to `output`. Raises CompileError with torch's words."""
    import torch
    from torch import _inductor as inductor

    arrays = [AcceleratorArray.from_json(fields) for fields in job["cache"]]
    example = _example(program, arrays, job)
    slots = {1: torch.export.Dim("slots", min=1, max=MOST_SLOTS)}
    before = len(example) - len(arrays) - len(program.weights)
    open_sizes = {"given": (None,) * before + (slots,) * len(arrays) + (None,) * len(program.weights)}
    try:
        with torch.no_grad():
            step = _module(flat_step(program, job["sizes"]["context"], arrays))
            exported = torch.export.export(step, tuple(example), strict=False, dynamic_shapes=open_sizes)
            inductor.aoti_compile_and_package(exported, package_path=str(output), inductor_configs=dict(job["configs"]))
    except (RuntimeError, ValueError, TypeError, AssertionError, OSError) as e:
        raise CompileError(f"AOTInductor of torch {torch.__version__} cannot compile it: {e}") from e


def _module(flat: Run) -> Any:
    import torch

    class Step(torch.nn.Module):
        def forward(self, *given: Tensor) -> Sequence[Tensor]:
            return flat(*given)

    return Step()


def _example(program: PortableProgram, arrays: Sequence[AcceleratorArray], job: Mapping[str, Any]) -> list[Tensor]:
    """Example tensors in the step's order."""
    import torch

    device, sizes = job["device"], job["sizes"]
    batch, query = sizes["batch"], sizes["query"]

    def numbers(*shape: int, value: int = 0) -> Tensor:
        return torch.full(shape, value, dtype=torch.int64, device=device)

    wanted = [job["weights"][name] for name in program.weights]
    largest: dict[str, int] = {}
    for shape, dtype in wanted:
        largest[dtype] = max(largest.get(dtype, 1), math.prod(shape))
    held = {dtype: torch.zeros(count, dtype=getattr(torch, dtype), device=device) for dtype, count in largest.items()}
    return [
        numbers(batch, query), numbers(batch), numbers(batch, value=1), numbers(batch),
        *(numbers(batch * query) for _ in range(2 * len(lengths_of(arrays)))),
        *(torch.zeros(a.size(EXAMPLE_SLOTS), dtype=getattr(torch, DTYPES[a.dtype]), device=device) for a in arrays),
        *(held[dtype][: math.prod(shape)].view(shape) for shape, dtype in wanted),
    ]  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return the exit code. The last line on stderr is the error, if any."""
    folder = Path(arguments[0])
    try:
        job = json.loads((folder / JOB).read_bytes())
        program = PortableProgram.parse((folder / GIVEN).read_bytes(), job["device"])
        raw = folder / "raw.pt2"
        compile_step(program, job, raw)
        (folder / LEFT).write_bytes(tidied(raw.read_bytes()))
    except (LlmcError, ValueError) as error:
        print(" ".join(str(error).split())[:2000], file=sys.stderr, flush=True)
        return error.exit_code if isinstance(error, LlmcError) else CompileError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
