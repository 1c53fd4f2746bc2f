"""Pulls of many nodes against closed forms, and against simulations that follow every stream and every chunk."""

from __future__ import annotations

import heapq
import math
from random import Random

import numpy as np
import pytest

from llmc.fleet.simulate import GBIT, BackOff, Network, Nodes, Pull, RegistryServer, simulate

SIZE = 1_000_000_000


def network(registry: float = 10, node: float = 10, connections: int = 100_000, **more: float) -> Network:
    nodes = Nodes(node, downloads=1, spread_s=more.pop("spread_s", 0.0))
    return Network(RegistryServer(registry, connections), nodes, BackOff(**more))


def test_nodes_on_one_link_take_their_bytes_over_its_bandwidth() -> None:
    for nodes in (1, 7, 300):
        (seconds,) = simulate([Pull(nodes, SIZE)], network())
        assert seconds == pytest.approx(np.full(nodes, nodes * SIZE / (10 * GBIT)))


def test_a_node_is_not_faster_than_its_own_link() -> None:
    (seconds,) = simulate([Pull(4, SIZE)], network(registry=100, node=2))
    assert seconds == pytest.approx(np.full(4, SIZE / (2 * GBIT)))


def test_a_queue_is_served_in_batches_of_the_registrys_connections() -> None:
    (seconds,) = simulate([Pull(10, SIZE, queued=True)], network(connections=4))
    batch = 4 * SIZE / (10 * GBIT)
    assert sorted(seconds) == pytest.approx([batch] * 4 + [2 * batch] * 4 + [2.5 * batch] * 2)


def test_connections_are_held_by_layers_up_to_the_downloads_of_a_node() -> None:
    of_three = Network(RegistryServer(10, 9), Nodes(10, downloads=3))
    (many,) = simulate([Pull(6, SIZE, layers=8, queued=True)], of_three)
    (one,) = simulate([Pull(6, SIZE, layers=1, queued=True)], of_three)
    assert len(np.unique(many.round(6))) == 2, "three nodes at a time"
    assert len(np.unique(one.round(6))) == 1, "all six"


def test_refused_nodes_wait_at_least_as_long_as_in_a_queue_and_at_most_a_pause_more() -> None:
    pause = 8.0
    requested = network(connections=2, first_s=pause, longest_s=pause, jitter=0.5)
    (queued,), (refused,) = (simulate([Pull(20, SIZE, queued=queued)], requested) for queued in (True, False))
    assert refused.max() >= queued.max() - 1e-6
    assert refused.max() <= queued.max() + 10 * pause


def test_equal_seeds_give_equal_pulls_and_others_do_not() -> None:
    def run(seed: int) -> list[float]:
        return list(simulate([Pull(40, SIZE)], Network(RegistryServer(10, 5), seed=seed))[0])

    assert run(1) == run(1) != run(2)


def streams(arrivals: list[tuple[float, float]], registry: float, link: float) -> list[float]:
    """Seconds of each (begin, size), every stream followed on its own: the exact fair share."""
    left, now, done = {}, 0.0, {}
    coming = sorted((begin, at) for at, (begin, _) in enumerate(arrivals))
    while coming or left:
        rate = min(link, registry / len(left)) if left else 0.0
        ends = now + min(left.values()) / rate if left else math.inf
        until = min(ends, coming[0][0] if coming else math.inf)
        left = {at: size - rate * (until - now) for at, size in left.items()}
        now = until
        for at in [at for at, size in left.items() if size <= 1e-3]:
            done[at] = now - arrivals[at][0]
            del left[at]
        while coming and coming[0][0] <= now:
            _, at = heapq.heappop(coming)
            left[at] = arrivals[at][1]
    return [done[at] for at in range(len(arrivals))]


def test_bundles_of_two_sizes_that_begin_one_after_another_share_exactly() -> None:
    pulls = [Pull(9, SIZE), Pull(14, SIZE // 3)]
    requested = network(registry=20, node=6, spread_s=3.0)
    found = simulate(pulls, requested)
    order = [(at, node) for at, pull in enumerate(pulls) for node in range(pull.nodes)]
    Random(requested.seed).shuffle(order)
    begins = [(index * 3.0 / len(order), float(pulls[at].size)) for index, (at, _) in enumerate(order)]
    exact = streams(begins, 20 * GBIT, 6 * GBIT)
    assert [found[at][node] for at, node in order] == pytest.approx(exact, rel=1e-6)


def swarm(nodes: int, chunks: int, registry: int, seed: int) -> float:
    """Chunk times until all have all: every node receives and sends one chunk at a time, the registry `registry`; who
    receives what from whom is drawn, rarest chunks first."""
    random = Random(seed)
    have: list[set[int]] = [set() for _ in range(nodes)]
    rounds = 0
    while any(len(one) < chunks for one in have):
        held = [sum(chunk in one for one in have) for chunk in range(chunks)]
        senders, source = set(range(nodes)), registry
        taken: list[tuple[int, int]] = []
        for node in sorted(range(nodes), key=lambda node: (len(have[node]), random.random())):
            for chunk in sorted(set(range(chunks)) - have[node], key=lambda chunk: (held[chunk], random.random())):
                offers = [sender for sender in senders if sender != node and chunk in have[sender]]
                if offers:
                    senders.remove(random.choice(offers))
                elif source and held[chunk] == 0:
                    source -= 1
                    held[chunk] += 1
                else:
                    continue
                taken.append((node, chunk))
                break
        for node, chunk in taken:
            have[node].add(chunk)
        rounds += 1
    return rounds


@pytest.mark.parametrize(("nodes", "chunks"), [(4, 32), (16, 32), (32, 24)])
def test_peers_are_about_as_fast_as_a_swarm_whose_every_chunk_is_followed(nodes: int, chunks: int) -> None:
    chunk = SIZE // chunks
    pull = Pull(nodes, chunk * chunks, unit=chunk, uploads=2, sources=2, queued=True)
    (seconds,) = simulate([pull], network(registry=20, node=10))
    exact = np.median([swarm(nodes, chunks, 2, seed) for seed in range(3)]) * chunk / (10 * GBIT)
    assert seconds.max() == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("nodes", [10, 1000])
def test_peers_are_never_faster_than_the_best_schedule(nodes: int) -> None:
    """Kumar and Ross, 2006: F / u_s, F / d, and N F / (u_s + N u) bound the time from below."""
    for registry, node in ((1.0, 10.0), (10.0, 10.0), (40.0, 10.0)):
        for pull in (Pull(nodes, SIZE, unit=4 << 20, uploads=50, sources=3, queued=True), Pull(nodes, SIZE, unit=SIZE)):
            (seconds,) = simulate([pull], network(registry, node))
            least = max(SIZE / registry, SIZE / node, nodes * SIZE / (registry + nodes * node)) / GBIT
            assert seconds.max() >= least * (1 - 1e-9)


def test_peers_that_serve_whole_layers_help_those_that_begin_later() -> None:
    def slowest(spread_s: float, unit: int | None) -> float:
        return float(simulate([Pull(200, SIZE, unit=unit)], network(spread_s=spread_s))[0].max())

    assert slowest(0.0, SIZE) == pytest.approx(slowest(0.0, None)), "all ask the registry at once"
    assert slowest(60.0, SIZE) < slowest(60.0, None) / 10


def test_ten_thousand_nodes_are_simulated() -> None:
    (seconds,) = simulate([Pull(10_000, SIZE, unit=4 << 20, uploads=50, sources=3, queued=True)], network())
    assert len(seconds) == 10_000 and seconds.max() < 2 * SIZE / (10 * GBIT)
