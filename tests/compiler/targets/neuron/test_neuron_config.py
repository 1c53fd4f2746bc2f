"""--override-neuron-config, and the environment's variables of Neuron."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llmc.artifacts.local.precompiled import path_for
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.planning import plan_for
from llmc.compiler.targets import open_target
from llmc.errors import InputError
from llmc.settings import Settings


def configured(config: str, **more: object) -> CompileOptions:
    requested = CompileOptions.of("neuron:trn2", override_neuron_config=config, **more)
    return open_target("neuron:trn2", Settings()).configure(requested)


def test_without_bucketing_there_is_one_bucket_of_each_phase() -> None:
    requested = CompileOptions.of("neuron", override_neuron_config='{"enable_bucketing": false}')
    plan = plan_for(None, max_model_len=128, max_num_seqs=4, device="neuron", options=requested, settings=Settings())
    assert {(b.phase, b.batch, b.query, b.context) for b in plan.buckets} == {
        ("prompt", 1, 127, 0), ("decode", 4, 1, 128),
    }  # fmt: skip
    many = plan_for(None, max_model_len=128, max_num_seqs=4, device="neuron", settings=Settings())
    assert len(many.buckets) > 2


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ("{}", 256),
        ('{"on_device_sampling_config": {"global_topk": 64}}', 64),
        ('{"on_device_sampling_config": {}}', 256),
        ('{"on_device_sampling_config": null}', 0),
    ],
)
def test_how_many_of_the_largest_logits_the_device_finds(config: str, found: int) -> None:
    assert configured(config).sample_top_k == found
    assert configured(config, sample_top_k=8).sample_top_k == 8


def test_degree_dtype_and_logical_cores_are_what_their_flags_are() -> None:
    found = configured('{"tp_degree": 2, "torch_dtype": "bfloat16", "logical_nc_config": 1}')
    assert (found.get("tensor_parallel"), found.dtype) == (2, "bf16")


@pytest.mark.parametrize(
    ("config", "more", "message"),
    [
        ("{", {}, "is not a JSON object"),
        ("[]", {}, "is not a JSON object"),
        ('{"enable_bucketing": "no"}', {}, "enable_bucketing must be true or false"),
        ('{"batch_size": 4}', {}, "batch_size is --max-num-seqs here"),
        ('{"context_encoding_buckets": [128]}', {}, "context_encoding_buckets is --from-file here"),
        ('{"fused_qkv": true}', {}, "fused_qkv is not supported here; known: enable_bucketing"),
        ('{"on_device_sampling_config": {"global_topk": 300}}', {}, "global_topk 300 must be in 1 … 256"),
        ('{"on_device_sampling_config": 4}', {}, "must be an object, or null"),
        ('{"tp_degree": 0}', {}, "tp_degree must be a positive number"),
        ('{"tp_degree": 2}', {"tensor_parallel": 4}, "tp_degree 2 is not --tensor-parallel 4"),
        ('{"torch_dtype": "float16"}', {}, "torch_dtype must be one of bfloat16, float32"),
        ('{"torch_dtype": "bfloat16"}', {"dtype": "f32"}, "torch_dtype is not --dtype f32"),
        ('{"logical_nc_config": 4}', {}, "logical_nc_config 4 is not offered for trn2; offered: 1, 2"),
    ],
)
def test_what_means_nothing_here_is_refused_by_name(config: str, more: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        configured(config, **more)


def test_the_environment_names_the_chip_and_a_framework_that_is_known() -> None:
    settings = Settings.from_environment({"NEURON_PLATFORM_TARGET_OVERRIDE": "inf2", "NEURON_QUANT_DTYPE": "s8"})
    assert open_target("neuron", settings).costs.memory(CompileOptions("neuron")) == (16 << 30, "of 1 cores of inf2")
    assert settings.neuron_quantisation == {"NEURON_QUANT_DTYPE": "s8"}
    with pytest.raises(InputError, match="VLLM_NEURON_FRAMEWORK='nxd' is not one of neuronx-distributed-inference"):
        Settings.from_environment({"VLLM_NEURON_FRAMEWORK": "nxd"})


def test_compiled_artifacts_have_a_place_whatever_the_chip(tmp_path: Path) -> None:
    assert path_for("neuron:trn2", str(tmp_path), None) == tmp_path / "neuron-compiled-artifacts"
    assert path_for("neuron", str(tmp_path), str(tmp_path / "named")) == tmp_path / "named"
    assert path_for("xla", str(tmp_path), str(tmp_path / "named")) is None
