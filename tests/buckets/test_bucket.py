"""A bucket, and the limits a plan lives in."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from llmc.buckets.bucket import Bucket
from llmc.buckets.cost.work import cost
from llmc.buckets.limits import Limits
from llmc.errors import InputError


def test_a_bucket_says_what_it_is():
    assert str(Bucket("prompt", 4, 512, 0)) == "prompt[4x512+0]"
    assert Bucket("prompt", 4, 512, 0).tokens == 2048


def test_a_bucket_covers_what_is_nowhere_larger():
    bucket = Bucket("prompt", 4, 512, 128)
    assert bucket.covers(4, 512, 128)
    assert bucket.covers(1, 1, 0)
    assert not bucket.covers(5, 1, 0)
    assert not bucket.covers(1, 513, 0)
    assert not bucket.covers(1, 1, 129)


def test_buckets_are_frozen_and_ordered():
    with pytest.raises(FrozenInstanceError):
        Bucket("decode", 1, 1, 0).batch = 2
    assert sorted([Bucket("decode", 2, 1, 0), Bucket("decode", 1, 1, 9)])[0].batch == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("prefill", 1, 1, 0), "phase 'prefill' is not one of prompt, decode"),
        (("prompt", 0, 1, 0), "batch 0 must be at least 1"),
        (("prompt", 1, 0, 0), "query 0 must be at least 1"),
        (("prompt", 1, 1, -1), "context -1 must be at least 0"),
        (("prompt", 1.0, 1, 0), "batch 1.0 is not an integer"),
        (("prompt", True, 1, 0), "batch True is not an integer"),
        (("decode", 1, 2, 0), "query 2 must be 1"),
    ],
)
def test_a_bucket_that_is_none_is_refused(values, message):
    with pytest.raises(InputError, match=message):
        Bucket(*values)


def test_cost_grows_in_every_dimension():
    base = cost(Bucket("prompt", 2, 64, 32))
    assert cost(Bucket("prompt", 3, 64, 32)) > base
    assert cost(Bucket("prompt", 2, 65, 32)) > base
    assert cost(Bucket("prompt", 2, 64, 33)) > base


def test_limits_have_defaults():
    limits = Limits(4096)
    assert (limits.max_num_seqs, limits.block_size) == (8, 128)
    assert limits.max_num_batched_tokens == 8 * 4096
    assert (limits.longest_prompt, limits.longest_past) == (4095, 4095)
    assert "max_prompt_len" not in limits.to_dict()


def test_the_default_block_fits_a_tiny_model():
    assert Limits(16).block_size == 16


def test_limits_can_be_replaced_one_by_one():
    limits = replace(Limits(256), max_prompt_len=100)
    assert limits.longest_prompt == 100
    assert limits.to_dict()["max_prompt_len"] == 100


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_model_len": 1}, "max_model_len 1 must be at least 2"),
        ({"max_model_len": "64"}, "max_model_len '64' is not an integer"),
        ({"max_num_seqs": 0}, "max_num_seqs 0 must be at least 1"),
        ({"block_size": 0}, "block_size 0 must be at least 1"),
        ({"block_size": 65}, r"block_size 65 must be at most max_model_len \(64\)"),
        ({"max_num_batched_tokens": 7}, "max_num_batched_tokens 7 is below max_num_seqs 8"),
        ({"max_prompt_len": 64}, r"max_prompt_len 64 must be at most max_model_len - 1 \(63\)"),
    ],
)
def test_limits_that_are_none_are_named(values, message):
    with pytest.raises(InputError, match=message):
        Limits(**({"max_model_len": 64} | values))
