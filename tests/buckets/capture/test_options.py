"""Flags win over the environment, which wins over the guide's defaults; shares out of range are refused."""

from __future__ import annotations

import pytest

from llmc.buckets.capture.options import CaptureOptions
from llmc.errors import InputError, UnknownNameError
from llmc.settings import Settings

ENVIRONMENT = {
    "VLLM_GRAPH_RESERVED_MEM": "0.4", "VLLM_GRAPH_PROMPT_RATIO": "0", "VLLM_GRAPH_PROMPT_STRATEGY": "max_bs",
    "VLLM_GRAPH_DECODE_STRATEGY": "min_tokens",
}  # fmt: skip


def test_defaults_are_the_guides():
    assert CaptureOptions.of(Settings()) == CaptureOptions(0.9, 0.1, 0.3, "min_tokens", "max_bs")


def test_the_environment_counts_where_no_flag_is_given():
    read = Settings.from_environment(ENVIRONMENT)
    assert CaptureOptions.of(read) == CaptureOptions(0.9, 0.4, 0.0, "max_bs", "min_tokens")
    given = CaptureOptions.of(read, graph_reserved_mem=0.0, graph_prompt_ratio=1.0, prompt_strategy="min_tokens")
    assert given == CaptureOptions(0.9, 0.0, 1.0, "min_tokens", "min_tokens")


@pytest.mark.parametrize("name", ["gpu_memory_utilization", "graph_reserved_mem", "graph_prompt_ratio"])
@pytest.mark.parametrize("share", [-0.1, 1.01, float("nan"), float("inf")])
def test_a_share_out_of_range_is_refused_by_its_flag(name, share):
    with pytest.raises(InputError, match=f"--{name.replace('_', '-')} {share} is not within 0 … 1"):
        CaptureOptions(**{name: share})


def test_no_memory_at_all_is_refused():
    with pytest.raises(InputError, match="--gpu-memory-utilization 0 leaves no memory"):
        CaptureOptions(gpu_memory_utilization=0)


def test_an_unknown_order_is_refused_with_the_known_ones():
    with pytest.raises(UnknownNameError) as error:
        CaptureOptions.of(Settings.from_environment({"VLLM_GRAPH_DECODE_STRATEGY": "fast"}))
    assert str(error.value) == (
        "unknown order of graph capture (--decode-strategy, VLLM_GRAPH_DECODE_STRATEGY) 'fast'; "
        "known: max_bs, min_tokens"
    )
