"""What targets say of the host of their server."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from llmc.compiler.targets import devices, open_target
from llmc.compiler.targets.cuda.gpus import GPUS
from llmc.compiler.targets.neuron.neuronx_cc import CHIPS as NEURON
from llmc.compiler.targets.xla.tpu import CHIPS, GKE

EXTRAS = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
NAMED = {"cuda": "cuda:l4", "tpu": "tpu:v5e-1x1"}
"""Devices that are named with what they are."""


@pytest.mark.parametrize("device", devices())
def test_every_target_has_an_extra_or_needs_an_image(device: str) -> None:
    hosting = open_target(NAMED.get(device, device)).hosting({})
    assert hosting.own_image or hosting.extra in ("", *EXTRAS)


@pytest.mark.parametrize(
    ("device", "resources"),
    [
        ("hpu", {"habana.ai/gaudi": 1}), ("tpu:v6e-2x4", {"google.com/tpu": 8}), ("cuda:h100-8", {"nvidia.com/gpu": 8}),
        ("inductor", {"nvidia.com/gpu": 1}), ("openvino:GPU", {"gpu.intel.com/i915": 1}),
        ("openvino:NPU", {"npu.intel.com/accel": 1}), ("cpu", {}), ("openvino", {}), ("lpu:2", {}),
    ],
)  # fmt: skip
def test_device_plug_ins(device: str, resources: dict[str, int]) -> None:
    assert open_target(device).hosting({}).resources == resources


@pytest.mark.parametrize(("chip", "cores", "chips"), [("trn1", 1, 1), ("inf2", 4, 2), ("trn2", 4, 1), ("trn2", 8, 2)])
def test_neuron_takes_the_chips_that_its_cores_are_on(chip: str, cores: int, chips: int) -> None:
    """Two NeuronCores make a logical one of trn2."""
    hosting = open_target(f"neuron:{chip}").hosting({"tensor_parallel": cores})
    assert hosting.resources == {"aws.amazon.com/neuron": chips} and len(hosting.devices) == chips
    assert NEURON[chip].cores * chips >= cores * NEURON[chip].default_lnc


def test_nodes_are_chosen_by_the_gpu_and_the_slice() -> None:
    assert GKE.keys() == CHIPS.keys()
    assert open_target("tpu:v5p-2x2x1").hosting({}).node_selector == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice", "cloud.google.com/gke-tpu-topology": "2x2x1",
    }  # fmt: skip
    for gpu in GPUS:
        (name,) = open_target(f"cuda:{gpu.name}").hosting({}).node_selector.values()
        assert name == gpu.product.replace(" ", "-")
