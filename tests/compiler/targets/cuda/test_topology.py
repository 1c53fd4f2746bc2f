"""Cards by name and number, what is known of them, and what XLA makes of each description without a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.compiler.targets.cuda import toolkit
from llmc.compiler.targets.cuda.gpus import GPUS, NAMES
from llmc.compiler.targets.cuda.target import known, parse_topology
from llmc.errors import DeviceError, InputError
from llmc.platforms import install_line
from tests.tiers import full

ROOT = Path(__file__).parents[4]
GIB = 1 << 30

DESCRIBED = """
import json
from llmc.compiler.targets.cuda.target import known
from llmc.runtime.executors.xla.client import open_client, platform_of

open_client("cpu")
found = {}
for topology in known():
    devices = topology.describe()
    found[topology.name] = [len(devices), devices[0].device_kind, platform_of(devices)]
print(json.dumps(found))
"""


@pytest.mark.parametrize("name", [t.name for t in known()])
def test_every_known_topology_is_read_back_by_its_name(name: str) -> None:
    assert parse_topology(name).name == name


def test_a_gpu_alone_is_one_device_and_several_are_one_host() -> None:
    assert [(t.name, t.devices, t.unit) for t in known() if t.gpu.name == "h100"] == [
        ("h100", 1, "GPU"), ("h100-2", 2, "GPU"), ("h100-4", 4, "GPU"), ("h100-8", 8, "GPU"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "--device cuda: name the GPU, as cuda:GPU[-COUNT], for example cuda:h100; known GPUs: a10g, a100"),
        ("x9", "unknown GPU 'x9'; known GPUs: a10g, a100"),
        ("h100-3", "h100 is not offered with 3 a host; known: h100, h100-2, h100-4, h100-8"),
        ("a100-40", "a100 is not offered with 40 a host"),
        ("gb200-8", "gb200 is not offered with 8 a host; known: gb200, gb200-2, gb200-4"),
        ("h100-", "unknown GPU 'h100-'"),
        ("-8", "unknown GPU '-8'"),
        ("H100", "unknown GPU 'H100'"),
        ("h100-²", "unknown GPU 'h100-²'"),
        ("h100-" + "9" * 5000, "unknown GPU"),
        ("../h100", "unknown GPU"),
    ],
)
def test_what_is_no_gpu_is_refused_with_those_that_are(text: str, says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)) as refused:
        parse_topology(text)
    assert len(str(refused.value)) < 400


def test_figures_of_a_gpu_agree_with_each_other() -> None:
    assert [gpu.name for gpu in GPUS] == list(NAMES)
    for gpu in GPUS:
        assert 20 * GIB < gpu.memory_bytes < 300 * GIB, gpu.name
        assert gpu.bf16_flops * 1.9 < (gpu.fp8_flops or 4 * gpu.bf16_flops), gpu.name
        assert bool(gpu.fp8_flops) == (gpu.compute_capability >= (8, 9)), gpu.name
        assert gpu.architecture.shared_per_block == gpu.architecture.shared_per_core - 1024, gpu.name
        assert gpu.slices[0] == 1 and list(gpu.slices) == sorted(gpu.slices)
        assert gpu.sources, gpu.name


def test_a_tenth_of_a_gpu_is_left_for_what_lies_outside_of_xla_s_pool() -> None:
    h100 = parse_topology("h100-8")
    assert h100.usable_bytes == int(84_942_979_072 * 0.9)


@given(st.lists(st.integers(1, 300), max_size=5), st.sampled_from([1, 2, 4]))
def test_an_array_takes_its_values_up_to_the_allocator_s_next_multiple(shape: list[int], item_bytes: int) -> None:
    values = item_bytes
    for n in shape:
        values *= n
    found = parse_topology("l4").array_bytes(shape, item_bytes)
    assert values <= found < values + 256 and found % 256 == 0


def test_keys_name_all_that_xla_is_reported_of_a_gpu() -> None:
    assert parse_topology("h100").components["gpu"] == parse_topology("h100-8").components["gpu"]
    assert len({t.components["gpu"] for t in known()}) == len(NAMES)
    assert len({t.components["topology"] for t in known()}) == len(known())


def child(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A process without this one's settings of JAX, XLA and CUDA, which ran `code`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "CUDA_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**kept, "PYTHONPATH": str(ROOT)}, cwd=folder, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done


needs_plugin = pytest.mark.skipif(find_spec("jax_cuda13_plugin") is None, reason="XLA's plug-in is not installed")


@full
@needs_plugin
def test_xla_describes_every_gpu_as_it_is_described_here_and_prints_nothing(tmp_path: Path) -> None:
    done = child(DESCRIBED, tmp_path)
    assert json.loads(done.stdout) == {t.name: [t.devices, t.gpu.product, "cuda"] for t in known()}
    assert done.stderr == ""


@full
@needs_plugin
def test_a_process_that_used_jax_before_can_still_compile_for_gpus(tmp_path: Path) -> None:
    """A notebook, for example: JAX registers no plug-in for CUDA when it starts on a host without a GPU."""
    code = (
        "import jax\n"
        "jax.numpy.zeros(1).block_until_ready()\n"
        "from llmc.compiler.targets.cuda.target import parse_topology\n"
        "print(parse_topology('h100-2').describe())\n"
    )
    done = child(code, tmp_path)
    assert done.stdout.count("NVIDIA H100") == 2


def test_a_toolkit_without_an_assembler_is_named_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Elsewhere:
        def locate_file(self, path: str) -> Path:
            return tmp_path / path

    monkeypatch.setattr(toolkit.metadata, "version", lambda name: "1")
    monkeypatch.setattr(toolkit.metadata, "distribution", lambda name: Elsewhere())
    with pytest.raises(DeviceError, match=rf"nvidia-cuda-nvcc has no ptxas .*{re.escape(install_line('cuda'))}"):
        toolkit.use_toolkit()


def test_the_package_s_assembler_leads_the_path_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "nvidia" / "cu13" / "bin"
    folder.mkdir(parents=True)
    (folder / "ptxas").write_text("#!/bin/sh\n")
    (folder / "ptxas").chmod(0o755)

    class Here:
        def locate_file(self, path: str) -> Path:
            return tmp_path / path

    monkeypatch.setattr(toolkit.metadata, "version", lambda name: "1")
    monkeypatch.setattr(toolkit.metadata, "distribution", lambda name: Here())
    monkeypatch.setenv("PATH", "/usr/local/cuda/bin:/bin")
    toolkit.use_toolkit()
    toolkit.use_toolkit()
    assert os.environ["PATH"] == f"{folder}:/usr/local/cuda/bin:/bin"
