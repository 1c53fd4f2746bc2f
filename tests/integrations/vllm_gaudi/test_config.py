"""The file of VLLM_BUCKETING_FROM_FILE, written and read."""

from __future__ import annotations

import ast
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.errors import InputError
from llmc.integrations.vllm_gaudi import config

PROMPTS = st.sets(
    st.tuples(st.integers(1, 4), st.integers(2, 6).map(lambda n: n * 128), st.integers(0, 12)), max_size=60
)
DECODES = st.sets(st.tuples(st.integers(1, 9), st.just(1), st.integers(1, 20)), max_size=60)


@given(PROMPTS, DECODES)
def test_what_is_written_is_read(prompts: set[tuple[int, ...]], decodes: set[tuple[int, ...]]) -> None:
    lists = {"prompt": tuple(sorted(prompts)), "decode": tuple(sorted(decodes))}
    text = config.write_buckets(lists, ["by llmc"])
    assert config.read_buckets(text, "buckets.txt") == lists


@given(PROMPTS, DECODES)
def test_every_line_is_a_literal_of_lists_once_its_ranges_are(
    prompts: set[tuple[int, ...]], decodes: set[tuple[int, ...]]
) -> None:
    """The server replaces ranges by lists and reads the rest as a Python literal, a tuple of three."""
    found = set()
    for line in config.write_buckets({"prompt": tuple(prompts), "decode": tuple(decodes)}).splitlines():
        if line.startswith("#"):
            continue
        plain = config._RANGE.sub(lambda match: str(list(eval(match[0]))), line)
        axes = [axis if isinstance(axis, list) else [axis] for axis in ast.literal_eval(plain)]
        found |= set(product(*axes))
    assert found == prompts | decodes


def test_products_are_written_as_one_line() -> None:
    lists = {
        "prompt": tuple(product([1], [128, 256, 384, 512, 1024], [0, 4, 8, 12])),
        "decode": (*product([1, 2, 4], [1], [8, 16]), (8, 1, 8)),
    }
    assert [line for line in config.write_buckets(lists).splitlines() if not line.startswith("#")] == [
        "(1, [128, 256, 384, 512, 1024], range(0, 13, 4))", "([1, 2, 4], 1, [8, 16])", "(8, 1, 8)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("(1, 128)", "2 entries instead of 3"),
        ("[1, 128, 0]", "this is not a bucket"),
        ("(1, 128, 0", "was never closed"),
        ("(1, 1, range(128))", "range of one number"),
        ("(1, 1, range(0, 20002, 2))", "more than 10000 numbers"),
        ("(1, 1, range(0, 20, 0))", "step 0"),
        ("(1, (128, 256), 0)", "reads no tuple here"),
        ("(1, 128.5, 0)", "not allowed in a bucket"),
        ("(1, '128', 0)", "not allowed in a bucket"),
        ("(0, 128, 0)", "batch 0"),
        ("(1, -128, 0)", "negative"),
        ("(1, [], 0)", "no value"),
        ("(1, __import__('os'), 0)", "not allowed in a bucket"),
    ],
)
def test_a_line_that_the_server_would_skip_is_an_error(line: str, message: str) -> None:
    with pytest.raises(InputError, match=rf"^b\.txt:2:\d+: .*{message}"):
        config.read_buckets(f"(1, 128, 0)  # fine\n{line}\n", "b.txt")


def test_the_file_that_the_variable_names_is_taken() -> None:
    files = {"buckets.txt": "a", "other.txt": "b"}
    assert config.bucket_file({"VLLM_BUCKETING_FROM_FILE": "/etc/vllm/other.txt"}, files) == ("other.txt", "b")
    assert config.bucket_file({}, files) == ("buckets.txt", "a")
    assert config.bucket_file({}, {}) is None
    assert config.bucket_file({}, {"mine.txt": "c", "config.yaml": "d"}) == ("mine.txt", "c")
    assert config.bucket_file({}, {"mine.txt": "c", "other.txt": "d"}) is None
    with pytest.raises(InputError, match=r"names /x\.txt, which is not there"):
        config.bucket_file({"VLLM_BUCKETING_FROM_FILE": "/x.txt"}, files)
