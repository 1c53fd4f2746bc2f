"""Container, pod and unit requirements of a target's bundles, for `llmc deploy`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Hosting:
    """Requirements of one server.

    resources              of the vendor's Kubernetes device plug-in, by name
    node_selector          labels of nodes that have the device
    devices                device nodes
    reservation, runtime   the same in Docker Compose's terms
    environment            set for the server
    extra                  the llmc extra that runs the bundles on a plain Python image
    own_image              the vendor's software that the image must bring where `extra` is not enough
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
    """Whether weights and cache are in host memory, and host CPUs compute."""


def nvidia(count: int, extra: str, product: str = "") -> Hosting:
    """NVIDIA GPUs, by the device plug-in; `product` is the driver's product name.

    GPU feature discovery makes a label of that name (NVIDIA/k8s-device-plugin, docs/gpu-feature-discovery: blanks
    become dashes).
    """
    return Hosting(
        extra=extra,
        resources={"nvidia.com/gpu": count},
        node_selector={"nvidia.com/gpu.product": product.replace(" ", "-")} if product else {},
        reservation={"driver": "nvidia", "count": count, "capabilities": ["gpu"]},
        host_memory=False,
    )
