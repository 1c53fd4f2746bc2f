"""The profile run measures what weights and a step of the largest prompt bucket take."""

from __future__ import annotations

import pytest

from llmc.buckets.bucket import Bucket
from llmc.buckets.capture.memory import profile
from llmc.buckets.capture.options import CaptureOptions
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan, Provenance
from llmc.errors import DeviceError, InputError
from tests.buckets.capture.simulated import GIB, GUIDE, MIB, prompt

PLAN = Plan(Limits(2048, 4, 8192, 128, 1024), tuple(GUIDE), Provenance("linear"))


class Loaded:
    """A device of which weights have left `before` bytes free, and a run leaves `after`."""

    def __init__(self, total: object, before: object, after: object) -> None:
        self.total, self.free, self.after = total, before, after
        self.ran: list[Bucket] = []

    def total_memory(self) -> int:
        return self.total  # type: ignore[return-value]

    def free_memory(self) -> int:
        return self.free  # type: ignore[return-value]

    def run(self, bucket: Bucket) -> None:
        self.ran.append(bucket)
        self.free = self.after


def test_the_largest_prompt_bucket_is_run_and_what_it_keeps_is_counted():
    device = Loaded(96 * GIB, 81 * GIB, 80 * GIB)
    there = profile(device, PLAN, 16 * MIB, CaptureOptions())
    assert device.ran == [prompt(4, 1024)]
    assert (there.total, there.weights, there.profile_run, there.free) == (96 * GIB, 15 * GIB, GIB, 80 * GIB)


def test_what_a_run_gives_back_is_free():
    there = profile(Loaded(96 * GIB, 80 * GIB, 81 * GIB), PLAN, 16 * MIB, CaptureOptions())
    assert (there.weights, there.profile_run, there.free) == (15 * GIB, 0, 81 * GIB)


def test_a_run_that_leaves_nothing_is_refused():
    with pytest.raises(InputError, match="96 GiB of device memory cannot hold 15 GiB of weights and 81 GiB"):
        profile(Loaded(96 * GIB, 81 * GIB, 0), PLAN, 16 * MIB, CaptureOptions())


def test_a_cache_whose_slots_are_longer_than_a_sequence_needs_more_blocks():
    device = Loaded(GIB, 40 * MIB, 40 * MIB)
    assert profile(device, PLAN, 2 * MIB, CaptureOptions()).blocks == 16
    with pytest.raises(InputError, match="hold 16 blocks of 2 MiB; one sequence of 2304 tokens needs 18"):
        profile(device, PLAN, 2 * MIB, CaptureOptions(), longest=2304)


@pytest.mark.parametrize("stated", [(-1, 0, 0), (96, None, 0), (96, 80, 1.5)])
def test_numbers_that_are_no_bytes_are_refused(stated):
    with pytest.raises(DeviceError, match="bytes of memory"):
        profile(Loaded(*stated), PLAN, 16 * MIB, CaptureOptions())


def test_more_free_than_there_is_is_refused():
    with pytest.raises(DeviceError, match="reports 97 GiB of 96 GiB of memory as free"):
        profile(Loaded(96 * GIB, 97 * GIB, 97 * GIB), PLAN, 16 * MIB, CaptureOptions())
