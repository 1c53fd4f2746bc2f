"""vLLM's constructor arguments: those that mean something here, and those that are told to have no effect."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from llmc.api.vllm_arguments import split
from llmc.errors import InputError


def test_compile_and_engine_arguments_go_their_ways() -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 4}
    given: dict[str, Any] = {"max_model_len": 128, "quantization": "int8", "dtype": "bfloat16", "seed": 3}
    given |= {"prefix_slots": 1, "speculative_config": drafts}
    compiled, engine = split(given)
    assert compiled == {"max_model_len": 128, "quantize": "int8", "dtype": "bf16"}
    assert engine == {"seed": 3, "prefix_slots": 1, "speculative_config": drafts}


@pytest.mark.parametrize(("cache", "ours"), [("fp8_e4m3", "fp8"), ("fp8", "fp8"), ("bfloat16", "bf16"), ("u8", "u8")])
def test_precisions_of_the_cache_in_both_spellings(cache: str, ours: str) -> None:
    assert split({"kv_cache_dtype": cache}) == ({"kv_cache_dtype": ours}, {})
    assert split({"kv_cache_dtype": "auto"}) == ({}, {})


@pytest.mark.parametrize(("dtype", "ours"), [
    ("float32", "f32"), ("float", "f32"), ("half", "f16"), ("float16", "f16"), ("bfloat16", "bf16"), ("f32", "f32"),
    ("torch.bfloat16", "bf16"), ("int9", "int9"),
])  # fmt: skip
def test_dtypes_in_both_spellings(dtype: str, ours: str) -> None:
    assert split({"dtype": dtype}) == ({"dtype": ours}, {})


def test_auto_leaves_the_choice_to_the_target() -> None:
    assert split({"dtype": "auto"}) == ({}, {})


@pytest.mark.parametrize(("given", "said"), [
    ({"tensor_parallel_size": 32}, "tensor_parallel_size=32 has no effect: a bundle runs as it was compiled"),
    ({"override_neuron_config": {"enable_bucketing": False}}, "override_neuron_config has no effect: the plan defines"),
    ({"trust_remote_code": True}, "no code of a checkpoint is run"),
])  # fmt: skip
def test_what_has_no_effect_is_said(given: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "llmc"):
        assert split(given) == ({}, {})
    assert said in caplog.text


def test_a_device_that_knows_an_option_takes_it() -> None:
    given = {"override_neuron_config": {"enable_bucketing": False}, "tensor_parallel_size": 2}
    wanted = {"override_neuron_config": '{"enable_bucketing": false}', "tensor_parallel": 2}
    assert split(given, "neuron:trn2") == (wanted, {})
    assert split({"tensor_parallel_size": 2}, "xla") == ({"tensor_parallel": 2}, {})


@pytest.mark.parametrize("given", [{"tensor_parallel_size": 1}, {"trust_remote_code": False}, {"tokenizer": None}])
def test_defaults_are_not_worth_a_word(given: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    assert split(given) == ({}, {}) and not caplog.records


def test_an_unknown_argument_names_the_nearest() -> None:
    with pytest.raises(
        InputError, match=r"LLM\(\) knows no argument 'max_model_length'; the nearest it knows is 'max_mo"
    ):
        split({"max_model_length": 12})
