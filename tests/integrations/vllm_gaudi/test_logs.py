"""The lists that a server printed when it started."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.errors import InputError
from llmc.integrations.vllm_gaudi import logs

SHAPES = st.sets(st.tuples(st.integers(1, 64), st.integers(1, 9000), st.integers(0, 9000)), min_size=1, max_size=20)


@given(SHAPES, SHAPES)
def test_printed_lists_are_read(prompts: set[tuple[int, ...]], decodes: set[tuple[int, ...]]) -> None:
    lists = {"prompt": tuple(sorted(prompts)), "decode": tuple(sorted(decodes))}
    lines = [
        "INFO Loading",
        "(EngineCore_DP0 pid=1) INFO Generated 1 prompt buckets [bs, query, num_blocks]: [(9, 9, 9)]",
    ]
    lines += [
        f"INFO 07-07 19:27:37 [common.py:85] Generated {len(shapes)} {family} buckets [bs, query, num_blocks]: "
        f"{list(shapes)}" for family, shapes in lists.items()
    ]  # fmt: skip
    assert logs.start_lists(lines) == lists


def test_buckets_of_two_numbers() -> None:
    lines = [
        "INFO Generated 2 prompt buckets [bs, seq]: [(1, 128), (2, 256)]",
        "INFO Generated 1 decode buckets [bs, total_blocks]: [(4, 512)]",
    ]
    assert logs.start_lists(lines) == {"prompt": ((1, 128, 0), (2, 256, 0)), "decode": ((4, 1, 512),)}


def test_lines_of_warm_up_stand_in_for_a_list() -> None:
    lines = [
        "INFO [Warmup][Graph/prompt][1/2] batch_size:4 query_len:1024 num_blocks:0 free_mem:21.06 GiB",
        "INFO [Warmup][Prompt][2/2] batch_size:1 query_len:128 num_blocks:2 free_mem:21.06 GiB",
        "INFO [Warmup][Graph/decode][1/1] batch_size:4 query_len:1 num_blocks:5746 free_mem:10.45 GiB",
    ]
    assert logs.start_lists(lines) == {"prompt": ((1, 128, 2), (4, 1024, 0)), "decode": ((4, 1, 5746),)}


def test_a_log_without_lists() -> None:
    assert logs.start_lists(["INFO Loading"]) is None
    assert logs.start_lists(["INFO Generated 1 prompt buckets [bs, query, num_blocks]: [(1, 128, 0)]"]) is None


@pytest.mark.parametrize("number", ["9" * 10, "9" * 5000])
def test_numbers_that_no_server_prints_are_none(number: str) -> None:
    line = f"[Warmup][Prompt][1/2] batch_size:1 query_len:128 num_blocks:{number} free_mem:1 GiB"
    assert logs.start_lists([line, line.replace("Prompt", "Decode")]) is None
    assert logs.start_lists([f"Generated {number} prompt buckets [bs, query, num_blocks]: [(1, 128, 0)]"]) is None
    with pytest.raises(InputError, match="lists 0 of"):
        logs.start_lists([f"Generated 1 prompt buckets [bs, query, num_blocks]: [(1, 128, {number})]"])


def test_half_a_line_is_an_error() -> None:
    with pytest.raises(InputError, match="line 1: 3 prompt buckets were generated, but the line lists 2"):
        logs.start_lists(["Generated 3 prompt buckets [bs, query, num_blocks]: [(1, 128, 0), (1, 256, 0), (1, 3"])
