"""Weights in 8 bits on NVIDIA's GPUs: offered where XLA reads them inside products, which is looked at here."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context

import pytest

from llmc.compiler.options import CompileOptions
from llmc.compiler.targets import open_target
from llmc.compiler.targets.cuda.gpus import GPUS, READ_FROM, gpu_of, lacks_format
from llmc.errors import InputError
from tests.tiers import full

ROWS, COLUMNS = 8192, 2048


def temporary(device: str, dtype: str) -> int:
    """Bytes that a product of eight tokens with such a matrix takes beside its inputs and outputs. Starts JAX."""
    from llmc.compiler.targets.xla.build import XlaJob, build
    from llmc.compiler.targets.xla.described import DescribedTarget
    from llmc.compiler.targets.xla.operators import Quantised
    from llmc.runtime.executors.envelope import ExecutableFile
    from llmc.runtime.executors.xla.envelope import FORM, Tensor

    target = open_target(device)
    assert isinstance(target, DescribedTarget)
    machine = target.machine(CompileOptions(device))
    shapes = {"x": ((8, COLUMNS), "bfloat16"), "w": ((ROWS, COLUMNS), dtype), "w_scale": ((ROWS,), "float32")}
    inputs = tuple(Tensor(name, shape, kind, (None,) * len(shape)) for name, (shape, kind) in shapes.items())
    built = build(XlaJob("step", lambda x, w, s: (Quantised(w, s).matmul(x, None),), inputs, (), "product"), machine)
    return int(ExecutableFile.parse(built, device, FORM).header["memory"]["temporary"])


@full
@pytest.mark.skipif(find_spec("jax_cuda13_plugin") is None, reason="XLA's plug-in is not installed")
def test_what_is_offered_is_read_inside_the_matmul_and_what_is_refused_would_be_copied() -> None:
    requested = [("cuda:h100", "float8_e4m3fn"), ("cuda:l40s", "int8"), ("cuda:l40s", "float8_e4m3fn")]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        *offered, refused = process.map(temporary, *zip(*requested, strict=True))

    assert max(offered) < ROWS * COLUMNS
    assert refused >= 2 * ROWS * COLUMNS


def test_each_gpu_offers_what_its_compute_capability_says() -> None:
    for gpu in GPUS:
        for name, least in READ_FROM.items():
            assert (lacks_format(gpu, name) == "") == (gpu.compute_capability >= least)
        assert lacks_format(gpu, "none") == ""


def test_a_format_that_the_gpu_would_copy_is_refused_with_what_to_choose() -> None:
    assert gpu_of("l40s") is not None
    message = r"--quantize fp8: .* from compute capability 9\.0 on, l40s has 8\.9: .* choose --quantize int8$"
    with pytest.raises(InputError, match=message):
        open_target("cuda:l40s").configure(CompileOptions.of("cuda:l40s", quantize="fp8"))
    fits = CompileOptions.of("cuda:l40s", quantize="int8", kv_cache_dtype="fp8")
    assert open_target("cuda:l40s").configure(fits).quantize == "int8"
