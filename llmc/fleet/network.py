"""What nodes pull a bundle through: a registry, their own links, and how they wait and help each other.

The defaults are those of common software where it states any; bandwidths are an assumption, one 10 Gbit/s port each.
"""

from __future__ import annotations

from dataclasses import dataclass, field

GBIT = 1e9 / 8
"""Bytes a second of one Gbit/s."""


@dataclass(frozen=True)
class Registry:
    """Sends `gbit_per_s` in all, over at most `connections`; it refuses more.

    1,024 connections: worker_connections in the configuration that nginx ships (conf/nginx.conf), of each of its
    processes; where nginx stands before a registry, its connections to that count too. A hosted registry may state its
    own: Azure's premium tier had 100 Mbit/s and 10,000 reads a minute (container-registry-skus; newer editions of this
    page state none).
    """

    gbit_per_s: float = 10.0
    connections: int = 1024


@dataclass(frozen=True)
class Nodes:
    """Each receives `gbit_per_s`, and can send as much at the same time. A pull holds `downloads` connections, one a
    layer: 3 is containerd's max_concurrent_downloads (docs/cri/config.md). The nodes begin evenly within `spread_s`
    seconds."""

    gbit_per_s: float = 10.0
    downloads: int = 3
    spread_s: float = 0.0


@dataclass(frozen=True)
class BackOff:
    """The pause after a refusal: `first_s`, doubled up to `longest_s`, each shortened by up to the share `jitter`.

    10 s and 300 s are the kubelet's for image pulls (pkg/kubelet/kubelet.go: backOffPeriod, MaxContainerBackOff), which
    has no jitter; polls of its pods are spread all the same.
    """

    first_s: float = 10.0
    longest_s: float = 300.0
    jitter: float = 0.5


@dataclass(frozen=True)
class Peers:
    """Nodes that serve what they have, in chunks of `chunk_mib`. `seeds` of them pull from the registry until one has
    all; each serves `uploads` others at once.

    As Dragonfly: pieces of 4 MiB, for layers of up to 2 GB (MIN_PIECE_LENGTH and MAX_PIECE_COUNT, 500, of its client);
    3 seed peers (replicas in its chart), which pull before others may (backToSourceCount: 3 once, 200 in newer charts);
    50 uploads (DefaultPeerConcurrentUploadLimit in scheduler/config/constants.go; 200 in newer releases).
    """

    chunk_mib: float = 4.0
    seeds: int = 3
    uploads: int = 50


@dataclass(frozen=True)
class Network:
    """All of it. Equal `seed`s give equal simulations."""

    registry: Registry = field(default_factory=Registry)
    nodes: Nodes = field(default_factory=Nodes)
    back_off: BackOff = field(default_factory=BackOff)
    peers: Peers = field(default_factory=Peers)
    seed: int = 0
