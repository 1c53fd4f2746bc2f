"""On-target compilation by AOTInductor, which compiles only for the GPU of its host (pytorch/pytorch#153697).

Inductor compiles one graph at a time, so each program is compiled in a process of its own, `--jobs` at once:

    python -m llmc.compiler.targets.inductor.on_target FOLDER

    FOLDER/program.pt2    the portable program
    FOLDER/job.json       {"device": "cuda" | "cpu", "sizes": {…} (runtime/executors/inductor/package.py),
                          "cache": [{…}, …] (runtime/executors/whole_step/step.py),
                          "weights": {name: [[size, …], dtype]}, "configs": {name: value} of torch._inductor.config}
    FOLDER/package.pt2    the result, in the format of the executor's package.py

The step is whole_step's `flat_step`: it updates the given cache in place, and takes its weights as inputs. The cache's
slot count stays dynamic, since memory decides it where the package runs. Only weight shapes are needed: all weights of
one dtype are views of one tensor, as large as the largest.

A package's bytes differ between runs: kernels are selected by timing, and machine code names its build folder. The key
therefore names the inputs: the portable program, torch, its CUDA, the GPU, its driver, the options, and the cache
capacity.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from llmc.artifacts.temporaries import temporary_folder
from llmc.compiler.targets.inductor.options import MODE, SECONDS, configs
from llmc.compiler.targets.on_target import EachExecutable
from llmc.compiler.targets.workers import last_lines, run_tool
from llmc.errors import CompileError, LlmcError
from llmc.runtime.executors.inductor import toolchain
from llmc.runtime.executors.inductor.package import CAPACITY, Package, sizes_of, tidied
from llmc.runtime.executors.weight_placements import read_placements
from llmc.runtime.executors.whole_step.step import DTYPES, AcceleratorArray, Run, cache_arrays, flat_step, lengths_of
from llmc.runtime.portable_program import PortableProgram
from llmc.settings import variables

if TYPE_CHECKING:
    from torch import Tensor

    from llmc.artifacts.bundle.manifest import Executable
    from llmc.artifacts.key import Value
    from llmc.compiler.targets.cuda.gpus import GpuSpec
    from llmc.runtime.bundle import Bundle

COMPILING = "llmc.compiler.targets.inductor.on_target"
COMPILER = "apt-get install g++"


class PackageCompiler(EachExecutable):
    """Compiles packages on the host of an NVIDIA GPU."""

    executor: ClassVar[str] = "inductor"
    reads: ClassVar[tuple[str, ...]] = ("weights.json",)
    device: ClassVar[str] = "cuda"

    def __init__(self, gpu: GpuSpec | None = None) -> None:
        self._gpu = gpu

    def lacks(self) -> str:
        torch = toolchain.torch_version()
        if not toolchain.is_known(torch):
            return f"{toolchain.WANTED}, this host has {torch or 'no torch'}; {toolchain.INSTALL}"
        if self.device == "cuda" and not toolchain.torch_cuda():
            return f"torch {torch} is built for CPUs here; install a build for CUDA: {toolchain.INSTALL}"
        if shutil.which(compiler := variables(("CXX",)).get("CXX", "g++")) is None:
            return f"AOTInductor needs a C++ compiler, and {compiler} is not on PATH; {COMPILER}, or set CXX to another"
        if not (here := self.host()):
            return "this process may not use an NVIDIA GPU: nvidia-smi lists those of the driver"
        gpu = self._gpu
        if gpu is not None and (gpu.product, gpu.capability) != (here.get("gpu"), here.get("compute_capability")):
            return (
                f"this host has {here.get('gpu')}, the bundle is for {gpu.product}; compile it there, or compile it "
                "again with --device inductor"
            )
        return ""

    def host(self) -> Mapping[str, str]:
        return toolchain.host()

    def pins(self, bundle: Bundle) -> Mapping[str, Value]:
        plan = bundle.plan
        capacity = max(plan.limits.max_model_len, *(b.context + b.query for b in plan.buckets))
        return {CAPACITY: capacity, MODE.name: str(bundle.manifest.options.get(MODE.name, MODE.default))}

    def compile(self, bundle: Bundle, executable: Executable) -> bytes:
        pins = self.pins(bundle)
        program = bundle.files.read(executable.blob)
        capacity = int(str(pins[CAPACITY]))
        sizes, arrays = sizes_of(executable, capacity), cache_arrays(bundle, capacity)
        job = {
            "device": self.device,
            "sizes": sizes,
            "cache": [array.to_json() for array in arrays],
            "weights": {
                name: [placement["shape"], placement["dtype"]] for name, placement in read_placements(bundle).items()
            },
            "configs": self.configs(str(pins[MODE.name])),
        }
        package = self._compiled(bundle, str(executable), program, job)
        texts = tuple(map(str, arrays))
        return Package(self.device, self.host(), sizes, texts, memoryview(program), memoryview(package)).to_bytes()

    def configs(self, mode: str) -> Mapping[str, Any]:
        """Return the values of torch._inductor.config."""
        return configs(mode)

    def _compiled(self, bundle: Bundle, name: str, program: bytes, job: Mapping[str, Any]) -> bytes:
        """Raises CompileError, with the process's last words and the path of its log."""
        seconds = bundle.option(SECONDS.name, SECONDS.default)
        logs = bundle.settings.user_cache_dir / "logs" / "inductor"
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"{name.replace(' ', '-')}.{os.getpid()}.log"
        with temporary_folder("inductor") as folder, log.open("wb") as out:
            Path(folder, GIVEN).write_bytes(program)
            Path(folder, JOB).write_text(json.dumps(job))
            environment = {**os.environ, **ENVIRONMENT, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache"}
            command = [sys.executable, "-m", COMPILING, str(folder)]
            code = run_tool(command, folder, out.fileno(), seconds, environment)
            package = Path(folder, LEFT).read_bytes() if code == 0 else b""
        if code == 0:
            log.unlink()
            return package
        if code is None:
            problem = f"did not end within {seconds} seconds, and was stopped; raise {SECONDS.flag}"
        elif code < 0:
            problem = f"was killed ({signal.Signals(-code).name}), perhaps for lack of memory: try fewer --jobs"
        else:
            problem = f"failed: {' | '.join(last_lines(log)) or f'it ended with {code}'}"
        raise CompileError(f"{bundle.path}: {name}: its compile by AOTInductor {problem}; the log: {log}")


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
