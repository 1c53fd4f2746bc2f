"""A fake device that captures graphs: the same numbers with and without, in memory that adds up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmc.buckets.bucket import Bucket
from llmc.errors import InputError, OutOfDeviceMemoryError
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.base import Executor
from llmc.runtime.executors.fake.executor import FakeExecutor, FakeGraphDevice
from llmc.runtime.step import pad
from tests.toy import Toy, greedy

MEMORY = 1 << 20


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    built = Toy.make(tmp_path_factory.mktemp("graphs"))
    built.compile(device=f"fake:graphs={MEMORY}", verify="none")
    return built


def opened(toy: Toy, total: int = MEMORY, slots: int = 4) -> tuple[FakeExecutor, FakeGraphDevice]:
    executor = open_executor(Bundle.open(toy.bundle), slots)
    assert isinstance(executor, FakeExecutor)
    device = executor.capabilities.graph_device
    assert device is not None
    device._total = total
    return executor, device


def text(executor: Executor, prompt: list[int], count: int) -> list[int]:
    """A greedy continuation in slot 0, in the first buckets that take it."""
    plan, built, given = executor.bundle.plan, [], list(prompt)
    past = 0
    for _ in range(count):
        phase = "prompt" if len(given) > 1 else "decode"
        bucket = plan.lookup(phase, 1, len(given), past)
        assert bucket is not None
        built.append(int(executor.run(pad(bucket, [0], [given], [past]))[0].argmax()))
        past += len(given)
        given = built[-1:]
    return built


@pytest.mark.parametrize("every", [1, 2, 100])
def test_captured_and_uncaptured_buckets_give_the_same_tokens(toy: Toy, every: int) -> None:
    executor, device = opened(toy)
    device.allocate(64)
    for number, bucket in enumerate(toy.plan.buckets):
        if number % every == 0:
            device.capture(bucket)
    for prompt in ([1, 2, 3], [9, 8, 7, 6, 5, 4]):
        assert [text(executor, prompt, 8)] == greedy(toy.model, [prompt], 8)


def test_a_graph_keeps_nothing_of_the_step_before(toy: Toy) -> None:
    (executor, device), (other, _) = opened(toy), opened(toy)
    bucket = Bucket("prompt", 4, 4, 0)
    device.allocate(64)
    device.capture(bucket)
    full = pad(bucket, [0, 1, 2, 3], [[9, 9, 9, 9]] * 4, [0] * 4)
    short = pad(bucket, [2], [[1]], [0])
    executor.run(full)
    np.testing.assert_array_equal(executor.run(short)[0], other.run(short)[0])


def test_what_is_free_is_what_weights_workspace_cache_and_graphs_leave(toy: Toy) -> None:
    _, device = opened(toy)
    weights = MEMORY - device.free_memory()
    largest = max(toy.plan.buckets, key=device.size_of)
    device.run(largest)
    assert device.free_memory() == MEMORY - weights - device.size_of(largest)
    device.allocate(8)
    assert device.free_memory() == MEMORY - weights - device.size_of(largest) - 8 * device.block_bytes
    before = device.free_memory()
    sizes = [device.capture(bucket) for bucket in toy.plan.buckets]
    assert device.free_memory() == before - sum(sizes)
    assert sizes == [device.expected(bucket) for bucket in toy.plan.buckets]


def test_the_workspace_grows_to_the_largest_step_and_no_further(toy: Toy) -> None:
    _, device = opened(toy)
    device.run(Bucket("prompt", 4, 8, 0))
    free = device.free_memory()
    device.run(Bucket("prompt", 1, 4, 0))
    assert device.free_memory() == free


def test_as_many_sequences_fit_as_the_blocks_hold(toy: Toy) -> None:
    executor, device = opened(toy, slots=2)
    device.allocate(64)
    assert executor.slots == 64 * toy.plan.limits.block_size // executor.capacity


def test_a_cache_for_no_whole_sequence_is_refused(toy: Toy) -> None:
    _, device = opened(toy)
    with pytest.raises(InputError, match="a KV cache of 8 tokens holds no sequence of 33"):
        device.allocate(1)


def test_without_a_start_the_first_step_makes_the_cache_it_was_opened_for(toy: Toy) -> None:
    executor, device = opened(toy, slots=3)
    before = device.free_memory()
    executor.import_prefix(1, [np.ones((1, 2, executor.hidden), np.float32)])
    assert executor.slots == 3
    assert device.free_memory() == before - 3 * executor.capacity * executor.hidden * 4


def test_a_device_too_small_for_the_weights_is_named_when_it_is_opened(tmp_path: Path) -> None:
    toy = Toy.make(tmp_path)
    toy.compile(device="fake:graphs=1000", verify="none")
    with pytest.raises(OutOfDeviceMemoryError, match=r"16.06 KiB of weights do not fit"):
        open_executor(Bundle.open(toy.bundle))


def test_no_room_for_cache_graph_or_workspace_is_said_and_keeps_what_is_there(toy: Toy) -> None:
    executor, device = opened(toy)
    device.allocate(8)
    bucket = Bucket("decode", 1, 1, 8)
    device.capture(bucket)
    device._total -= device.free_memory()
    for call in (
        lambda: device.capture(Bucket("decode", 4, 1, 32)), lambda: device.run(Bucket("prompt", 4, 8, 0)),
        lambda: device.hold_cache(10_000),
    ):  # fmt: skip
        with pytest.raises(OutOfDeviceMemoryError, match="the fake device has 0 B of"):
            call()
    executor.run(pad(bucket, [0], [[1]], [0]))


def test_graphs_have_a_fixed_shape(toy: Toy) -> None:
    with pytest.raises(InputError, match="--no-specialise: graphs have a fixed shape"):
        toy.compile(device=f"fake:graphs={MEMORY}", specialise=False)


@pytest.mark.parametrize("detail", ["graphs", "graphs=", "graphs=0", "graphs=-1", "graphs=4MiB"])
def test_behind_the_name_is_a_number_of_bytes(toy: Toy, detail: str) -> None:
    with pytest.raises(InputError, match="graphs=N, N bytes of memory"):
        toy.compile(device=f"fake:{detail}")


def test_other_fake_devices_capture_none(toys: dict[str, Toy]) -> None:
    assert open_executor(Bundle.open(toys["static"].bundle)).capabilities.graph_device is None
