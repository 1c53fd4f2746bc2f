"""On-target compilation by AOTInductor, which compiles only for the GPU of its host (pytorch/pytorch#153697).

Each program is compiled in a process of its own (compiling.py), `--jobs` at once. A package's bytes differ between
runs: kernels are selected by timing, and machine code names its build folder. The key therefore names the inputs: the
portable program, torch, its CUDA, the GPU, its driver, the options, and the cache capacity.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from llmc.artifacts.temporaries import temporary_folder
from llmc.compiler.targets.inductor.compiling import ENVIRONMENT, GIVEN, JOB, LEFT
from llmc.compiler.targets.inductor.options import MODE, SECONDS, configs
from llmc.compiler.targets.on_target import EachExecutable
from llmc.compiler.targets.workers import last_lines, run_tool
from llmc.errors import CompileError
from llmc.runtime.executors.inductor import toolchain
from llmc.runtime.executors.inductor.package import CAPACITY, Package, sizes_of
from llmc.runtime.executors.weight_placements import read_placements
from llmc.runtime.executors.whole_step.cache import cache_arrays
from llmc.settings import variables

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Executable
    from llmc.artifacts.key import Value
    from llmc.compiler.targets.cuda.gpus import GpuSpec
    from llmc.runtime.bundle import Bundle

COMPILING = "llmc.compiler.targets.inductor.compiling"
COMPILER = "apt-get install g++"


class PackageCompiler(EachExecutable):
    """Compiles packages on the host of an NVIDIA GPU."""

    executor: ClassVar[str] = "inductor"
    reads: ClassVar[tuple[str, ...]] = ("weights.json",)
    device: ClassVar[str] = "cuda"

    def __init__(self, gpu: GpuSpec | None = None) -> None:
        self._gpu = gpu

    def lacks(self) -> str:
        """torch of a known release, for CUDA, a C++ compiler, or a GPU."""
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
        """The GPU and its software."""
        return toolchain.host()

    def pins(self, bundle: Bundle) -> Mapping[str, Value]:
        """The capacity of a cache slot, and Inductor's mode."""
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
        """The package that the process wrote. Raises CompileError, with its last words and the path of its log."""
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
