"""The target inductor: what it says of itself, and what it asks of a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.buckets.bucket import Bucket
from llmc.compiler.architectures.shared.size import ModelSize
from llmc.compiler.options import CompileOptions
from llmc.compiler.targets import open_target
from llmc.compiler.targets.base import shaping
from llmc.compiler.targets.inductor.options import configs
from llmc.errors import InputError, UnknownNameError
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors import open_executor
from tests.compiler import tiny

MODEL = ModelSize.of(tiny.config("llama"), "config.json")


def test_a_bundle_is_portable_runs_on_this_cpu_and_says_what_is_left(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    assert {item.state for item in opened.manifest.executables} == {"portable"}
    assert "NVIDIA GPU and torch 2.11 to 2.13" in str(opened.manifest.options["remaining"])
    executor = open_executor(opened)
    assert executor.capabilities.in_place_of == "NVIDIA GPU"
    executor.close()


def test_how_kernels_are_chosen_is_no_part_of_a_portable_programs_key() -> None:
    target = open_target("inductor")
    tuned = target.configure(CompileOptions.of("inductor", inductor_mode="max-autotune"))
    assert shaping(target.description, tuned) == shaping(
        target.description, target.configure(CompileOptions("inductor"))
    )
    assert tuned.own == {"inductor_mode": "max-autotune"}
    assert configs("max-autotune") == {
        "max_autotune": True, "coordinate_descent_tuning": True, "triton.cudagraphs": False
    }  # fmt: skip
    assert configs("default") == {"triton.cudagraphs": False}, "the executor captures, never Inductor"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"inductor_mode": "fast"}, UnknownNameError), ({"inductor_timeout": 0}, InputError),
        ({"quantize": "int8"}, InputError), ({"specialise": False}, InputError),
    ],
)  # fmt: skip
def test_what_it_does_not_offer_is_refused(options: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        open_target("inductor").configure(CompileOptions.of("inductor", **options))


def test_graphs_share_the_values_of_the_largest_step() -> None:
    target = open_target("inductor")
    options = target.configure(CompileOptions("inductor", dtype="bf16"))
    prompt, decode = Bucket("prompt", 1, 64, 0), Bucket("decode", 4, 1, 64)
    assert target.costs.graph_bytes(MODEL, prompt, options) == target.costs.graph_bytes(MODEL, decode, options)
    gathered = 2 * MODEL.cache_values * 4 * 64
    assert target.costs.workspace_bytes(MODEL, decode, options) > gathered, "the past of four rows, as it is gathered"


def test_a_named_gpu_is_what_plans_are_held_against() -> None:
    options = CompileOptions("inductor")
    assert open_target("inductor").costs.memory(options) is None, "the GPU is that of another host"
    found = open_target("inductor:h100").costs.memory(options)
    assert found is not None
    assert found[0] > 79 * 10**9
    assert "H100" in found[1]
    with pytest.raises(UnknownNameError, match="unknown GPU 'h1000'; known: a100"):
        open_target("inductor:h1000")
