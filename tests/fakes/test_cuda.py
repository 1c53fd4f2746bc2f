"""The fake torch.cuda fails as the real one does: what tests over it rest on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.fakes import cuda
from tests.fakes.cuda.state import Gpu

MIB = 1 << 20


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    with torch.inference_mode():
        yield cuda.install(monkeypatch, memory=64 * MIB)


def on_card(*sizes: int) -> torch.Tensor:
    return torch.ones(sizes).to(torch.device("cuda", 0))


def captured(run: Callable[[], Any], pool: Any = None) -> tuple[Any, Any]:
    """A graph of what `run` does, and what it returned."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(pool=pool)
        found = run()
        graph.capture_end()
    return graph, found


def test_host_and_card_do_not_mix(gpu: Gpu) -> None:
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cpu"):
        on_card(2) + torch.ones(2)


def test_a_graph_reads_its_inputs_where_they_were_and_runs_nothing_when_it_is_captured(gpu: Gpu) -> None:
    given, kept = on_card(2), on_card(2)
    graph, made = captured(lambda: kept.add_(given).mul(2))
    given.copy_(torch.tensor([2.0, 3.0]))
    kept.copy_(torch.zeros(2))
    graph.replay()
    assert (made.cpu().tolist(), kept.cpu().tolist()) == ([4, 6], [2, 3])


def test_an_input_that_was_freed_is_garbage(gpu: Gpu) -> None:
    inputs = [on_card(2)]
    graph, made = captured(lambda: inputs[0] + 1)
    inputs.clear()
    graph.replay()
    assert made.cpu().isnan().all()


@pytest.mark.parametrize("wait", [lambda t: t.sum().item(), lambda t: t.cpu(), lambda t: torch.cuda.synchronize()])
def test_what_waits_is_not_permitted_in_a_capture_which_is_lost_then(gpu: Gpu, wait: Callable[[Any], Any]) -> None:
    given, graph = on_card(2), torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
            wait(given)
        with pytest.raises(RuntimeError, match="failed due to a previous error during capture"):
            given + 1
        with pytest.raises(RuntimeError, match="failed due to a previous error during capture"):
            graph.capture_end()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()
    assert (given + 1).cpu().tolist() == [2, 2], "the stream captures no longer"


def test_the_pool_of_a_lost_capture_has_to_be_told(gpu: Gpu) -> None:
    pool = torch.cuda.MemPool()
    given = on_card(2)

    def lost() -> None:
        captured(given.cpu, pool.id)

    with pytest.raises(RuntimeError, match="not permitted"):
        lost()
    gpu.capturing, gpu.invalid = None, False
    with pytest.raises(RuntimeError, match="already recording to mempool_id"):
        captured(lambda: given + 1, pool.id)
    torch.cuda.memory._cuda_endAllocateToPool(0, pool.id)
    captured(lambda: given + 1, pool.id)
    with pytest.raises(RuntimeError, match="not currently recording"):
        torch.cuda.memory._cuda_endAllocateToPool(0, pool.id)


def test_the_default_stream_captures_nothing(gpu: Gpu) -> None:
    with pytest.raises(RuntimeError, match="captured on a non-default stream"):
        torch.cuda.CUDAGraph().capture_begin()


def test_a_graph_that_was_reset_replays_nothing_and_gives_its_memory_back(gpu: Gpu) -> None:
    given = on_card(2)
    before = torch.cuda.mem_get_info()[0]
    graph, made = captured(lambda: given + 1)
    assert torch.cuda.mem_get_info()[0] < before - 2 * MIB
    del made
    graph.reset()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == before
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()


def test_graphs_of_a_pool_share_what_none_of_them_holds(gpu: Gpu) -> None:
    given, pool = on_card(3 * MIB), torch.cuda.MemPool()
    first, made = captured(lambda: (given + 1).mul(2).sum(), pool.id)
    reserved = gpu.allocator.reserved
    second, other = captured(lambda: (given + 1).mul(3).sum(), pool.id)
    assert gpu.allocator.reserved == reserved
    first.replay()
    second.replay()
    assert (made.cpu().item(), other.cpu().item()) == (4 * 3 * MIB, 6 * 3 * MIB)
    captured(lambda: given.add(1).sum())
    assert gpu.allocator.reserved > reserved, "without the pool there is another"


def test_a_replay_overwrites_what_lives_where_it_was_captured(gpu: Gpu) -> None:
    given, pool = on_card(3 * MIB), torch.cuda.MemPool()
    graph, _ = captured(lambda: given.add(1).sum(), pool.id)
    with torch.cuda.use_mem_pool(pool):
        lives = given.mul(1)
    outside = given.mul(1)
    graph.replay()
    assert lives.cpu().isnan().any()
    assert not outside.cpu().isnan().any()


def test_memory_is_taken_in_segments_and_cached_until_the_card_is_full(gpu: Gpu) -> None:
    small = on_card(4)
    assert gpu.allocator.reserved == 2 * MIB
    large = on_card(8 * MIB)
    assert gpu.allocator.reserved == 34 * MIB
    view = large.narrow(0, 0, 10)
    del large, view
    assert gpu.allocator.reserved == 34 * MIB
    on_card(10 * MIB)
    assert gpu.allocator.reserved == 42 * MIB, "what was cached made room"
    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate 64\.00 MiB"):
        torch.zeros(16 * MIB, device=torch.device("cuda", 0))
    assert small.cpu().tolist() == [1] * 4


def test_a_pool_that_nobody_uses_cannot_be_joined(gpu: Gpu) -> None:
    given = on_card(2)
    graph, _ = captured(lambda: given + 1)
    pool = graph.pool()
    graph.reset()
    with pytest.raises(RuntimeError, match="use_count > 0"):
        captured(lambda: given + 1, pool)


def test_copies_from_pageable_memory_wait_and_from_pinned_need_not(gpu: Gpu) -> None:
    given = on_card(2)
    before = gpu.synchronized
    given.copy_(torch.zeros(2), non_blocking=True)
    assert gpu.synchronized == before + 1
    pinned = torch.empty(2, pin_memory=True)
    given.copy_(pinned, non_blocking=True)
    pinned.narrow(0, 0, 1).copy_(given.narrow(0, 0, 1), non_blocking=True)
    assert gpu.synchronized == before + 1
