"""AOTInductor itself, on the CPU: a bucket's step compiled, packaged, loaded and run.

Run on hardware, as far as a CPU goes; what a GPU adds (Triton's kernels, CUDA graphs) is contract-tested elsewhere.
Quick settings: nothing vectorised, nothing optimised, no precompiled header.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from llmc.artifacts.bundle.manifest import Executable
from llmc.buckets.bucket import Bucket
from llmc.compiler.targets.inductor.on_target import PackageCompiler, compile_step
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors.inductor import toolchain
from llmc.runtime.executors.inductor.package import Package
from llmc.runtime.executors.torch.executor import TorchWeights
from llmc.runtime.executors.whole_step.step import Run, cache_arrays, flat_step, inputs, lengths_of
from llmc.runtime.portable_program import PortableProgram
from llmc.runtime.step import pad
from tests.runtime.executors.whole_step.test_step_program import ARRAYS, CAPACITY, filled, summing


class CpuPackageCompiler(PackageCompiler):
    """For the CPU of this host, which no user can ask for."""

    device: ClassVar[str] = "cpu"

    def host(self) -> Mapping[str, str]:
        return {"torch": toolchain.torch_version()}

    def configs(self, mode: str) -> Mapping[str, Any]:
        return {
            **super().configs(mode), "aot_inductor.compile_wrapper_opt_level": "O0", "cpp.simdlen": 1,
            "aot_inductor.precompile_headers": False, "compile_threads": 1,
        }  # fmt: skip


@pytest.fixture(scope="module")
def opened(bundle: Path) -> Bundle:
    return Bundle.open(bundle)


@pytest.fixture(scope="module")
def decode(opened: Bundle) -> Executable:
    return next(item for item in opened.manifest.executables if item.phase == "decode")


@pytest.fixture(scope="module")
def package(opened: Bundle, decode: Executable) -> Package:
    if shutil.which("g++") is None:
        pytest.skip("AOTInductor needs g++: apt-get install g++")
    on_target = CpuPackageCompiler()
    assert on_target.lacks() == ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")  # nor asked of the compiler: four seconds
        return Package.parse(on_target.compile(opened, decode), "decode")


@pytest.fixture(scope="module")
def run(package: Package) -> Run:
    return package.open("decode", torch.device("cpu"))


@pytest.mark.full
@pytest.mark.parametrize("slots", [1, 2, 7])
def test_a_package_gives_what_its_program_gives_and_writes_the_cache_in_place(
    slots: int, package: Package, run: Run, opened: Bundle, decode: Executable
) -> None:
    sizes = package.sizes
    program = PortableProgram.parse(bytes(package.program))
    weights = [TorchWeights(opened).tensor(name) for name in program.weights]
    arrays = cache_arrays(opened, sizes["capacity"])
    assert package.cache == tuple(map(str, arrays))
    (array,) = arrays
    kept = torch.from_numpy(np.random.default_rng(slots).standard_normal(array.size(slots), np.float32))
    expected, address = kept.clone(), kept.data_ptr()
    bucket = next(b for b in opened.plan.buckets if b.phase == "decode")
    live = min(slots, 2)
    step = inputs(pad(bucket, [*range(live)], [[3 + row] for row in range(live)], [5] * live), lengths_of(arrays))
    with torch.inference_mode():
        logits, *top = run(*step, kept, *weights)
        wanted, *wanted_top = flat_step(program, sizes["context"], arrays)(*step, expected, *weights)
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(kept, expected, rtol=1e-4, atol=1e-5)
    assert len(top) == len(wanted_top)
    assert kept.data_ptr() == address
    assert not torch.equal(kept[:, :live, 5], torch.zeros_like(kept[:, :live, 5]))


@pytest.mark.full
def test_a_package_has_no_weights_and_no_path_of_the_compiles_folder(package: Package, opened: Bundle) -> None:
    import mmap

    from llmc.runtime.executors.weight_placements import map_weights, read_placements

    largest = max(read_placements(opened).values(), key=lambda index: index["length"])
    data = map_weights(opened, mmap.ACCESS_READ)
    assert data[largest["offset"] : largest["offset"] + 256] not in bytes(package.package)
    assert b"// g++" not in bytes(package.package), "the sources, with the compiler's command lines"


def test_a_step_over_any_cache_is_exported_for_any_number_of_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """What AOTInductor is given: tokens, rings and states are written where they lie."""
    exported: list[Any] = []
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", lambda given, **_: exported.append(given))
    program: Any = SimpleNamespace(run=summing, cache_inputs=3, weights=())
    sizes = {"batch": 3, "query": 2, "context": 8, "capacity": CAPACITY}
    job = {"device": "cpu", "sizes": sizes, "cache": [a.to_json() for a in ARRAYS], "weights": {}, "configs": {}}
    compile_step(program, json.loads(json.dumps(job)), Path("unused"))
    step = inputs(pad(Bucket("prompt", 3, 2, 8), [1, 0], [[3, 4], [5]], [5, 0]), lengths_of(ARRAYS))
    for slots in (2, 7):
        kept, wanted = filled(slots), filled(slots)
        (logits,) = exported[0].module()(*step, *kept)
        (wanted_logits,) = flat_step(program, 8, ARRAYS)(*step, *wanted)
        assert torch.equal(logits, wanted_logits)
        assert all(map(torch.equal, kept, wanted))
