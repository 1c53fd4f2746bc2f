"""HPU graphs under the memory budget, on a fake accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llmc.buckets.bucket import Bucket
from llmc.buckets.capture.graphs import capture
from llmc.buckets.capture.memory import Memory, profile
from llmc.buckets.capture.options import CaptureOptions
from llmc.errors import InputError, OutOfDeviceMemoryError
from llmc.runtime.executors.hpu.executor import HpuGraphs, HpuOnDevice
from llmc.runtime.step import pad
from llmc.testing.executors import PLAN, prefill
from tests.runtime.executors.hpu.conftest import Host
from tests.tiers import default_cases, full

Opened = Callable[..., HpuOnDevice]
TOTAL = 24 << 20


def divided(executor: HpuOnDevice, **options: Any) -> tuple[HpuGraphs, Memory]:
    """The accelerator's memory, after the profile run."""
    device = executor.capabilities.graph_device
    assert isinstance(device, HpuGraphs)
    return device, profile(device, PLAN, device.block_bytes, CaptureOptions(**options))


@pytest.fixture
def lazy(host: Host) -> Any:
    return host("HPU Graphs", FAKE_HPU_MEMORY=str(TOTAL))


@default_cases("PyTorch eager mode")
@pytest.mark.parametrize("mode", ["torch.compile", "PyTorch eager mode", "PyTorch lazy mode"])
def test_only_the_mode_of_hpu_graphs_captures(mode: str, host: Host, on_device: Opened) -> None:
    host(mode)
    assert on_device().capabilities.graph_device is None


def test_the_profile_run_needs_no_cache_and_the_cache_takes_what_memory_leaves(lazy: Any, on_device: Opened) -> None:
    executor = on_device()
    device, memory = divided(executor, gpu_memory_utilization=0.5)
    assert executor.memory()["cache"] == 0
    assert memory.total == TOTAL
    assert memory.weights == executor.memory()["weights"]
    device.allocate(memory.blocks)
    assert executor.slots == memory.blocks * PLAN.limits.block_size // executor.capacity > 6
    assert memory.kv_cache - executor.memory()["cache"] < executor.capacity * device.block_bytes
    assert prefill(executor, executor.slots - 1, [1, 2, 3]).any()


@full
def test_captured_buckets_replay_and_give_what_they_gave(lazy: Any, on_device: Opened) -> None:
    executor, plain = on_device(), on_device()
    device, memory = divided(executor, graph_reserved_mem=0.9)
    device.allocate(memory.blocks)
    outcome = capture(device, PLAN.buckets, memory.margin, memory.options)
    assert not outcome.uncaptured
    assert executor.memory()["graphs"] == len(PLAN.buckets)
    assert all(graph.size > 0 for phase in outcome.phases for graph in phase.captured)
    ran = lazy.accelerator().pending
    executor.compilations.ready()
    for bucket in PLAN.buckets:
        past = min(bucket.context, 3)
        tokens = [[5, 6, 7][: bucket.query]] * min(2, bucket.batch)
        rows = [np.array(one.run(pad(bucket, range(len(tokens)), tokens, [past] * len(tokens)))) for one in (
            seeded(executor), seeded(plain)
        )]  # fmt: skip
        np.testing.assert_allclose(rows[0][: len(tokens)], rows[1][: len(tokens)], rtol=1e-5, atol=1e-5)
    assert ran == []
    assert executor.compilations.count == 0


def seeded(executor: HpuOnDevice) -> HpuOnDevice:
    """The same tokens in two slots."""
    for slot in range(2):
        prefill(executor, slot, [slot + 1, 2, 3])
    return executor


def test_a_accelerator_that_runs_out_of_memory_in_the_middle_keeps_its_graphs_and_runs_the_rest(
    lazy: Any, on_device: Opened
) -> None:
    executor = on_device()
    device, memory = divided(executor, graph_reserved_mem=0.9)
    device.allocate(memory.blocks)
    order: list[Bucket] = []

    def on_progress(attempt: Any) -> None:
        order.append(attempt.bucket)
        if len(order) == 4:
            lazy.accelerator().fail_after = 20

    outcome = capture(device, PLAN.buckets, memory.margin, memory.options, on_progress=on_progress)
    lazy.accelerator().fail_after = None
    assert executor.memory()["graphs"] == 3
    assert len(outcome.uncaptured) == len(PLAN.buckets) - 3
    assert any(str(order[3]) in note for note in outcome.notes)
    free = device.free_memory()
    for bucket in order:
        executor.run(pad(bucket, [0], [[1] * bucket.query], [0]))
    assert device.free_memory() == free, "a half graph held memory"
    assert device.capture(order[3]) > 0, "the accelerator takes another capture"


def test_an_interrupt_leaves_no_half_graph(lazy: Any, on_device: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = on_device()
    executor.open_all()
    device = executor.capabilities.graph_device
    assert device is not None
    free = device.free_memory()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    bucket = PLAN.prompt[0]
    name = executor.bundle.executable("prompt", bucket.batch, bucket.query, bucket.context).blob
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setitem(executor._runs, name, interrupted)
        device.capture(bucket)
    assert (device.free_memory(), executor.memory()["graphs"]) == (free, 0)
    assert device.capture(bucket) > 0


def test_a_cache_that_holds_no_sequence_is_refused(lazy: Any, on_device: Opened) -> None:
    device = on_device().capabilities.graph_device
    assert device is not None
    with pytest.raises(InputError, match="a KV cache of 24 tokens holds no sequence of 33"):
        device.allocate(3)
    with pytest.raises(OutOfDeviceMemoryError, match=r"GAUDI2 .*Allocation failed.* bytes are free"):
        device.allocate(1 << 20)
