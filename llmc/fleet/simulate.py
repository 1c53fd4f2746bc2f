"""Event-based simulation of nodes that pull bundles concurrently; between two events, bytes flow at constant rates.

The model, exact except for the last rule:

- Streams share. A registry that sends B bytes a second to E pulls gives each min(b, B / E), b being a node's link.
- A registry has a connection limit. A node that it refuses backs off and tries again, or waits in a queue.
- A node serves others once it has a unit of the bundle, a chunk or the largest layer, and sends b bytes a second.
- A pull that finds a peer with a free upload uses it; other pulls use the registry.
- All pulls of a bundle share the peers' uploads equally: k pulls that H nodes and the registry serve get
  min(b, (H b + the registry's part) / k) each. Until one node has the whole bundle, they get no more than the
  registry's part, since nobody can pass on missing data. N nodes then take as long as the best possible schedule
  (Kumar and Ross, Peer-assisted file distribution: the minimum distribution time, 2006), plus the time until all
  have a chunk.

All pulls of a bundle have one rate, so they end in the order in which they began. One byte clock per bundle replaces
the remaining bytes of each node, and an event costs O(log nodes).

The network defaults are those of common software where documented; bandwidths are an assumption, one 10 Gbit/s port
each.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from random import Random

import numpy as np
from numpy.typing import NDArray

GBIT = 1e9 / 8
"""Bytes a second of one Gbit/s."""

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class RegistryServer:
    """Sends `gbit_per_s` in total, over at most `connections`; it refuses more.

    1,024 connections: worker_connections in the configuration that nginx ships (conf/nginx.conf), per process; where
    nginx stands before a registry, its connections to the registry also count. A hosted registry may state its own:
    Azure's premium tier had 100 Mbit/s and 10,000 reads a minute (container-registry-skus; newer editions of this page
    state none).
    """

    gbit_per_s: float = 10.0
    connections: int = 1024


@dataclass(frozen=True)
class Nodes:
    """Each receives `gbit_per_s`, and can send as much at the same time.

    A pull holds `downloads` connections, one per layer: 3 is containerd's max_concurrent_downloads
    (docs/cri/config.md). The nodes begin evenly within `spread_s` seconds.
    """

    gbit_per_s: float = 10.0
    downloads: int = 3
    spread_s: float = 0.0


@dataclass(frozen=True)
class BackOff:
    """The pause after a refusal: `first_s`, doubled up to `longest_s`, each shortened by up to the fraction `jitter`.

    10 s and 300 s are the kubelet's for image pulls (pkg/kubelet/kubelet.go: backOffPeriod, MaxContainerBackOff). It
    has no jitter, but the polls of its pods are spread.
    """

    first_s: float = 10.0
    longest_s: float = 300.0
    jitter: float = 0.5


@dataclass(frozen=True)
class Peers:
    """Nodes that serve the chunks they have, `chunk_mib` each.

    `seeds` of them pull from the registry until one has the whole bundle; each serves `uploads` others at once.
    Defaults follow Dragonfly: pieces of 4 MiB, for layers of up to 2 GB (MIN_PIECE_LENGTH and MAX_PIECE_COUNT, 500, of
    its client); 3 seed peers (replicas in its chart), which pull before others may (backToSourceCount: 3 once, 200 in
    newer charts); 50 uploads (DefaultPeerConcurrentUploadLimit in scheduler/config/constants.go; 200 in newer
    releases).
    """

    chunk_mib: float = 4.0
    seeds: int = 3
    uploads: int = 50


@dataclass(frozen=True)
class Network:
    """The whole network. Equal `seed`s give equal simulations."""

    registry: RegistryServer = field(default_factory=RegistryServer)
    nodes: Nodes = field(default_factory=Nodes)
    back_off: BackOff = field(default_factory=BackOff)
    peers: Peers = field(default_factory=Peers)
    seed: int = 0


@dataclass(frozen=True)
class Pull:
    """`nodes` pull one bundle of `size` bytes in `layers` layers.

    A node that has `unit` bytes serves `uploads` others at once; None means that none does. At most `sources` pull from
    the registry at once, and as many do, regardless of peers, until one has the whole bundle; None means every pull
    without a peer. With `queued`, a refused pull is served in order as soon as there is room, and does not back off.
    """

    nodes: int
    size: int
    layers: int = 1
    unit: int | None = None
    uploads: float = math.inf
    sources: int | None = None
    queued: bool = False


@dataclass
class _Bundle:
    """Pulls of one bundle: `clock` is the bytes that a pull from the very beginning would have by now."""

    pull: Pull
    connections: int
    begin: Seconds
    end: Seconds
    clock: float = 0.0
    rate: float = 0.0
    holders: int = 0
    complete: bool = False
    waiting: deque[int] = field(default_factory=deque)
    """Nodes in the queue."""
    ends: deque[tuple[float, int]] = field(default_factory=deque)
    """Clock at the end, and node, of active pulls, ascending."""
    holds: deque[float] = field(default_factory=deque)
    """Clock at which each of them starts to serve others."""

    def at_registry(self, more: int = 0) -> int:
        """Pulls that the registry serves, plus `more`."""
        pulls, unit = len(self.ends) + more, self.pull.unit
        beyond = pulls - self.pull.uploads * self.holders if self.holders else pulls
        kept = 0 if self.complete or unit is None else min(pulls, self.pull.sources or 1)
        return int(max(beyond, kept, 0))

    def next(self) -> float:
        """Seconds until one of its pulls has a unit or the whole bundle."""
        if not self.ends:
            return math.inf
        clock = min(self.ends[0][0], self.holds[0] if self.holds else math.inf)
        return max(0.0, clock - self.clock) / self.rate


def simulate(pulls: Sequence[Pull], network: Network) -> list[Seconds]:
    """Return the seconds of each pull from its node's start to its end, in node order, for each of `pulls`."""
    return _Run(pulls, network).run()


class _Run:
    def __init__(self, pulls: Sequence[Pull], network: Network) -> None:
        self._network, self._random = network, Random(network.seed)  # noqa: S311 - a simulation
        self._link = network.nodes.gbit_per_s * GBIT
        self._registry = network.registry.gbit_per_s * GBIT
        held = min(network.nodes.downloads, network.registry.connections)
        self._bundles = [
            _Bundle(pull, min(held, pull.layers), np.zeros(pull.nodes), np.zeros(pull.nodes)) for pull in pulls
        ]
        self._now = 0.0
        order = [(at, node) for at, pull in enumerate(pulls) for node in range(pull.nodes)]
        self._random.shuffle(order)
        every = network.nodes.spread_s / max(1, len(order))
        self._tries = [(index * every, 0, at, node) for index, (at, node) in enumerate(order)]
        heapify(self._tries)
        for when, _, at, node in self._tries:
            self._bundles[at].begin[node] = when

    def run(self) -> list[Seconds]:
        left = len(self._tries)
        while left:
            one = min(self._bundles, key=_Bundle.next)
            when = self._now + one.next()
            if self._tries and self._tries[0][0] <= when:
                self._try()
                continue
            self._advance(when)
            if one.holds and one.holds[0] <= one.ends[0][0]:
                one.clock = one.holds.popleft()
                one.holders += 1
            else:
                one.clock, node = one.ends.popleft()
                one.complete, one.end[node] = True, self._now
                left -= 1
            self._admit()
        return [one.end - one.begin for one in self._bundles]

    def _advance(self, now: float) -> None:
        for one in self._bundles:
            one.clock += one.rate * (now - self._now)
        self._now = now

    def _try(self) -> None:
        when, tries, at, node = self._tries[0]
        one, back_off = self._bundles[at], self._network.back_off
        if one.pull.queued or self._room(one):
            heappop(self._tries)
            self._advance(when)
            one.waiting.append(node)
            self._admit()
        else:
            pause = min(back_off.longest_s, back_off.first_s * 2.0 ** min(tries, 60))
            pause *= 1 - back_off.jitter * self._random.random()
            heapreplace(self._tries, (when + pause, tries + 1, at, node))

    def _admit(self) -> None:
        for one in self._bundles:
            while one.waiting and self._room(one):
                one.ends.append((one.clock + one.pull.size, one.waiting.popleft()))
                if one.pull.unit is not None:
                    one.holds.append(one.clock + min(one.pull.unit, one.pull.size))
        self._rates()

    def _room(self, requested: _Bundle) -> bool:
        after = requested.at_registry(1)
        if after <= requested.at_registry():
            return True
        held = sum(one.at_registry() * one.connections for one in self._bundles) + requested.connections
        return held <= self._network.registry.connections and after <= (requested.pull.sources or math.inf)

    def _rates(self) -> None:
        streams = [one.at_registry() for one in self._bundles]
        each = min(self._link, self._registry / max(1, sum(streams)))
        for one, served in zip(self._bundles, streams, strict=True):
            one.rate = 0.0
            if one.ends:
                part = served * each
                one.rate = min(self._link, (part + one.holders * self._link) / len(one.ends))
                if one.pull.unit is not None and not one.complete:
                    one.rate = min(one.rate, part)
