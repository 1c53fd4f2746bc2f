"""CUDA graphs under the memory budget, on a fake card: how much they take there says nothing of hardware."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llmc.buckets.bucket import PHASES, Bucket
from llmc.buckets.capture.graphs import capture
from llmc.buckets.capture.memory import Memory, profile
from llmc.buckets.capture.options import CaptureOptions
from llmc.errors import InputError, OutOfDeviceMemoryError
from llmc.runtime.executors.inductor import executor as module
from llmc.runtime.executors.inductor.executor import CudaGraphs, InductorOnDevice
from llmc.runtime.step import pad
from llmc.testing.executors import PLAN, TOP, prefill
from tests.fakes.cuda.state import Gpu
from tests.runtime.executors.inductor.conftest import Host
from tests.tiers import full

pytestmark = full

Opened = Callable[..., InductorOnDevice]
TOTAL = 64 << 20


@pytest.fixture
def gpu(host: Host, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A card in the mode of CUDA graphs; nothing is compiled, which is slow and not what is asked here."""
    monkeypatch.setattr(module, "whole_graph", lambda run: run)
    return host("CUDA graphs", memory=TOTAL)


def divided(executor: InductorOnDevice, **options: Any) -> tuple[CudaGraphs, Memory]:
    """The card's memory, after the profile run, and the cache made."""
    device = executor.capabilities.graph_device
    assert isinstance(device, CudaGraphs)
    memory = profile(device, PLAN, device.block_bytes, CaptureOptions(**options))
    device.allocate(memory.blocks)
    return device, memory


def blob(executor: InductorOnDevice, bucket: Bucket) -> str:
    return executor.bundle.executable(bucket.phase, bucket.batch, bucket.query, bucket.context).blob


@pytest.mark.parametrize("mode", ["torch.compile", "PyTorch eager mode"])
def test_only_the_mode_of_cuda_graphs_captures(mode: str, host: Host, on_device: Opened) -> None:
    host(mode)
    assert on_device().capabilities.graph_device is None


def test_the_profile_run_gives_its_cache_back_and_keeps_the_pool(gpu: Gpu, on_device: Opened) -> None:
    executor = on_device()
    device, memory = divided(executor, gpu_memory_utilization=0.5)
    assert memory.total == TOTAL
    assert memory.profile_run >= 2 << 20
    assert executor.slots == memory.blocks * PLAN.limits.block_size // executor.capacity > 6
    assert memory.kv_cache - executor.memory()["cache"] < executor.capacity * device.block_bytes
    assert prefill(executor, executor.slots - 1, [1, 2, 3]).any()


def test_captured_buckets_replay_from_one_pool_and_give_what_they_gave(gpu: Gpu, on_device: Opened) -> None:
    executor = on_device()
    device, memory = divided(executor, graph_reserved_mem=0.9)
    wanted = [results(executor, bucket) for bucket in PLAN.buckets]
    reserved = gpu.allocator.reserved
    expected = dict.fromkeys(PHASES, device.expected)
    outcome = capture(device, PLAN.buckets, memory.margin, memory.options, expected)
    assert not outcome.uncaptured
    assert executor.memory()["graphs"] == len(PLAN.buckets)
    assert gpu.allocator.reserved == reserved, "the pool was large enough for all"
    for phase in outcome.phases:
        for graph in phase.captured[1:]:
            assert abs(graph.size - graph.predicted) <= 0.15 * graph.size
    executor.compilations.ready()
    for bucket, want in zip(PLAN.buckets, wanted, strict=True):
        launched = gpu.launched
        for got, one in zip(results(executor, bucket), want, strict=True):
            np.testing.assert_allclose(got, one, rtol=1e-5, atol=1e-5)
        assert gpu.launched > launched
    assert executor.compilations.count == 0


def results(executor: InductorOnDevice, bucket: Bucket) -> list[Any]:
    """Of a step of the bucket with live and dummy rows: its top, its logits, and what is cached then."""
    for slot in range(2):
        prefill(executor, slot, [slot + 1, 2, 3])
    past = min(bucket.context, 3)
    tokens = [[5, 6, 7][: bucket.query]] * min(2, bucket.batch)
    step = pad(bucket, range(len(tokens)), tokens, [past] * len(tokens))
    top = executor.run_top(step)
    live = len(tokens)
    values, ids = top.values[:live].copy(), top.ids[:live].copy()
    logits = executor.logits()[:live].copy()
    return [values, ids, logits, *executor.export_prefix(0, past + len(tokens[0]))]


def test_a_replay_launches_nothing_but_the_copy_of_its_inputs(gpu: Gpu, on_device: Opened) -> None:
    executor = on_device()
    executor.require_cache()
    bucket = PLAN.decode[-1]
    prefill(executor, 0, [1, 2])
    device = executor.capabilities.graph_device
    assert device is not None and device.capture(bucket) > 0
    prefill(executor, 0, [1, 2])
    launched, waited = gpu.launched, gpu.synchronized
    executor.run_top(pad(bucket, [0], [[3]], [2]))
    assert (gpu.launched - launched, gpu.synchronized - waited) == (1, 1)


def test_only_the_top_of_logits_comes_to_the_host_until_somebody_requests(
    gpu: Gpu, on_device: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = on_device()
    fetched: list[tuple[int, ...]] = []
    fetch = executor._results.fetch
    monkeypatch.setattr(
        executor._results, "fetch", lambda which, *a: (fetched.append(tuple(which)), fetch(which, *a))[1]
    )
    executor.run_top(pad(PLAN.prompt[0], [0], [[1, 2]], [0]))
    assert fetched == [(module.VALUES, module.IDS, module.TIED)]
    assert executor.logits() is executor.logits()
    assert fetched[1:] == [(module.LOGITS,)]


def test_logits_that_equal_the_last_of_the_top_are_settled_by_all(gpu: Gpu, on_device: Opened) -> None:
    """The program picked the last ids of equal logits; the contract wants the lowest."""
    executor, bucket = on_device(), PLAN.prompt[0]
    step = pad(bucket, [0], [[1, 2]], [0])
    executor.run(step)
    torch, device, vocabulary = executor._torch, executor.accelerator.device, executor._vocabulary

    def equal(*_: Any) -> list[Any]:
        logits = torch.zeros((bucket.batch, vocabulary), device=device)
        ids = torch.arange(vocabulary - TOP, vocabulary).expand(bucket.batch, TOP).clone().to(device)
        return [logits, torch.zeros((bucket.batch, TOP), device=device), ids]

    executor._runs[blob(executor, bucket)] = equal
    assert executor.run_top(step).ids[0].tolist() == list(range(TOP))


def test_a_gpu_that_runs_out_of_memory_in_the_middle_keeps_its_graphs_and_runs_the_rest(
    gpu: Gpu, on_device: Opened
) -> None:
    executor = on_device()
    device, memory = divided(executor, graph_reserved_mem=0.9)
    order: list[Bucket] = []

    def on_progress(attempt: Any) -> None:
        order.append(attempt.bucket)
        if len(order) == 4:
            gpu.allocator.fail_after = 20

    outcome = capture(device, PLAN.buckets, memory.margin, memory.options, on_progress=on_progress)
    gpu.allocator.fail_after = None
    assert executor.memory()["graphs"] == 3
    assert len(outcome.uncaptured) == len(PLAN.buckets) - 3
    assert any(str(order[3]) in note for note in outcome.notes)
    for bucket in PLAN.buckets:
        executor.run(pad(bucket, [0], [[1] * bucket.query], [0]))
    held = gpu.allocator.held
    assert device.capture(order[3]) > 0, "the card takes another capture"
    assert gpu.allocator.held > held


def test_a_capture_that_fails_in_the_middle_is_dropped_named_and_runs_uncaptured(gpu: Gpu, on_device: Opened) -> None:
    executor = on_device()
    device, memory = divided(executor, graph_reserved_mem=0.9)
    executor.open_all()
    bad = PLAN.decode[0]
    run = executor._runs[blob(executor, bad)]

    def waits(*given: Any) -> Any:
        found = run(*given)
        if gpu.capturing is not None:
            found[0].sum().item()
        return found

    executor._runs[blob(executor, bad)] = waits
    outcome = capture(device, PLAN.buckets, memory.margin, memory.options)
    ((failed, why),) = [(one.bucket, one.why) for one in outcome.uncaptured]
    assert failed == bad
    assert "the device cannot capture it: " in why and "operation not permitted when stream is capturing" in why
    assert executor.memory()["graphs"] == len(PLAN.buckets) - 1, "those behind it were captured"
    assert results(executor, bad)


def test_an_interrupt_leaves_no_half_graph(gpu: Gpu, on_device: Opened) -> None:
    executor = on_device()
    device, _ = divided(executor)
    executor.open_all()
    bucket = PLAN.prompt[0]
    name = blob(executor, bucket)
    executor.run(pad(bucket, [0], [[1]], [0]))
    free, run = device.free_memory(), executor._runs[name]

    def interrupted(*given: Any) -> None:
        run(*given)
        raise KeyboardInterrupt

    executor._runs[name] = interrupted
    with pytest.raises(KeyboardInterrupt):
        device.capture(bucket)
    executor._runs[name] = run
    assert (device.free_memory(), executor.memory()["graphs"]) == (free, 0)
    assert device.capture(bucket) > 0


def test_a_cache_that_holds_no_sequence_is_refused(gpu: Gpu, on_device: Opened) -> None:
    device = on_device().capabilities.graph_device
    assert device is not None
    with pytest.raises(InputError, match="a KV cache of 24 tokens holds no sequence of 33"):
        device.allocate(3)
    with pytest.raises(OutOfDeviceMemoryError, match=r"H100 .*CUDA out of memory.* bytes are free"):
        device.allocate(1 << 20)


def test_closing_gives_the_whole_gpu_back(gpu: Gpu, on_device: Opened) -> None:
    executor = on_device()
    device, _ = divided(executor)
    assert device.capture(PLAN.decode[0]) > 0
    executor.close()
    gc.collect()
    gpu.allocator.empty_cache()
    assert (gpu.allocator.reserved, gpu.allocator.held) == (0, 0)
