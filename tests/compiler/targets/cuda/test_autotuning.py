"""XLA's autotuning results: read as XLA writes them, written as it reads them, refused where they do not hold.

The text of a GPU is what XLA of jax 0.10.2 looked products up with for a described H100, as its notes tell.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.compiler.targets.cuda.gpus import gpu_of
from llmc.compiler.targets.cuda.tuning import AutotuneEntry, built_for, device_text, parse, require_fits, serialise
from llmc.compiler.targets.tuning import Results
from llmc.errors import ArtifactError
from llmc.runtime.executors.xla import wire

H100 = "CUDA: 9.0, Cores: 132, GPU clock: 1.98 GHz, Memory bandwidth: 3352 GB/s, L2 cache: 50 MB, DNN version: 9.10.0"
REAL = H100.replace("1.98", "1.755").replace("3352", "3350").replace("9.10.0", "9.14.0")
JAX = "0.10.2 0.10.2 0.10.2"
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)


def test_a_described_gpu_has_the_text_that_xla_gives_it() -> None:
    gpu = gpu_of("h100")
    assert gpu is not None
    assert device_text(gpu.target_config()) == H100


@given(st.dictionaries(TEXT, st.binary(max_size=20), max_size=5))
def test_what_is_written_for_xla_is_read(found: dict[str, bytes]) -> None:
    assert parse(serialise(found, H100)) == [AutotuneEntry(H100, hlo, found[hlo]) for hlo in sorted(found)]


@given(st.binary(max_size=60))
def test_other_bytes_are_refused_or_have_no_entries(data: bytes) -> None:
    try:
        parse(wire.field(1, 3) + data)
    except ArtifactError:
        return


@pytest.mark.parametrize("data", [b"", wire.field(1, 2), serialise({"a": b"1"}, H100)[:-1]])
def test_another_version_and_a_torn_file_are_refused(data: bytes) -> None:
    with pytest.raises(ArtifactError):
        parse(data)


def test_clock_bandwidth_and_cudnn_of_a_real_gpu_may_differ_a_little() -> None:
    require_fits(Results(built_for(REAL, "NVIDIA H100 80GB HBM3", JAX)), H100, JAX, "file")


@pytest.mark.parametrize(
    ("device", "compiler", "differs"),
    [
        (REAL.replace("CUDA: 9.0", "CUDA: 8.9"), JAX, "compute capability 8.9, not 9.0"),
        (REAL.replace("132", "114"), JAX, "multiprocessors 114, not 132"),
        (REAL.replace("3350", "4916"), JAX, "GB/s 4916, not 3352"),
        (REAL.replace("9.14.0", "8.9.7"), JAX, "cuDNN 8.9.7, not 9"),
        (REAL, "0.11.0", "jax, jaxlib and plug-in 0.11.0, not 0.10.2 0.10.2 0.10.2"),
        ("ROCM: gfx942", JAX, "compute capability none, not 9.0"),
    ],
)
def test_results_of_another_gpu_or_version_are_refused(device: str, compiler: str, differs: str) -> None:
    with pytest.raises(ArtifactError, match=f"^file: results of a GPU .*{differs}.*--tuning model$"):
        require_fits(Results(built_for(device, "a GPU", compiler)), H100, JAX, "file")
