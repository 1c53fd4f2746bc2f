"""What a device's memory is divided into, and memory that is too small."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.capture.memory import Memory
from llmc.buckets.capture.options import CaptureOptions
from llmc.errors import InputError
from tests.buckets.capture.simulated import GIB, MIB
from tests.buckets.generators import PROPERTY

DEFAULT = CaptureOptions()


def test_utilisation_is_of_what_is_free_after_the_profile_run_as_the_guides_example():
    there = Memory(100 * GIB, 49 * GIB, GIB, 16 * MIB, 128, 2048, DEFAULT)
    assert (there.free, there.usable, there.margin) == (50 * GIB, 45 * GIB, 5 * GIB)
    assert there.graphs == int(4.5 * GIB)


@PROPERTY
@given(st.integers(1, 1 << 40), st.floats(0.01, 1), st.floats(0, 0.99), st.integers(1, 1 << 20))
def test_nothing_is_lost_nor_counted_twice(free, utilisation, reserved, block):
    options = CaptureOptions(gpu_memory_utilization=utilisation, graph_reserved_mem=reserved)
    try:
        there = Memory(free + 5, 3, 2, block, 16, 16, options)
    except InputError:
        return
    assert there.free == free == there.margin + there.graphs + there.kv_reserved
    assert there.kv_reserved - block < there.kv_cache <= there.kv_reserved
    assert there.free_for_capture - there.margin >= there.graphs


def test_weights_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match=r"8 GiB of device memory cannot hold 14\.97 GiB of weights and 504 MiB"):
        Memory(8 * GIB, int(14.97 * GIB), 504 * MIB, 16 * MIB, 128, 2048, DEFAULT)


def test_a_cache_below_one_sequence_is_refused_with_what_would_help():
    with pytest.raises(InputError) as error:
        Memory(16 * GIB, 15 * GIB, 900 * MIB, 16 * MIB, 128, 2048, DEFAULT)
    assert str(error.value) == (
        "100.4 MiB for the KV cache hold 6 blocks of 16 MiB; one sequence of 2048 tokens needs 16: raise "
        "--gpu-memory-utilization, lower --graph-reserved-mem or plan for a shorter --max-model-len"
    )
