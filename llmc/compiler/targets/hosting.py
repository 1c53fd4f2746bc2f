"""What a container, pod or unit needs to run a target's bundles. `llmc deploy` writes it; a target says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Hosting:
    """Of one server. `resources` are those of the vendor's Kubernetes device plug-in, by name; `node_selector` are
    labels of nodes that have the device; `devices` are device nodes; `reservation` and `runtime` are Docker Compose's
    words for the same; `environment` is set for the server.

    `extra` of llmc has what runs the bundles, on an image of plain Python; `own_image`: that is not enough, and the
    image has to bring the vendor's software, which `own_image` names.
    """

    extra: str = ""
    own_image: str = ""
    resources: Mapping[str, int] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    reservation: Mapping[str, Any] = field(default_factory=dict)
    runtime: str = ""
    host_memory: bool = True
    """Whether weights and cache lie in the host's memory, and its processors compute."""


def nvidia(count: int, extra: str, product: str = "") -> Hosting:
    """NVIDIA cards, by the device plug-in; `product` as the driver names it, which GPU feature discovery makes a label
    of (NVIDIA/k8s-device-plugin, docs/gpu-feature-discovery: blanks become dashes)."""
    return Hosting(
        extra=extra,
        resources={"nvidia.com/gpu": count},
        node_selector={"nvidia.com/gpu.product": product.replace(" ", "-")} if product else {},
        reservation={"driver": "nvidia", "count": count, "capabilities": ["gpu"]},
        host_memory=False,
    )
