"""torch.hpu."""

from __future__ import annotations

from typing import Any

from habana_frameworks.torch import _accelerator
from habana_frameworks.torch.hpu.graphs import HPUGraph, graph, wrap_in_hpu_graph

__all__ = ["Event", "HPUGraph", "Stream", "graph", "wrap_in_hpu_graph"]


def _lazy_init() -> None:
    _accelerator.accelerator()


init = _lazy_init


def is_available() -> bool:
    """Never raises: 0 accelerators where there is none."""
    return _accelerator.count() > 0


def device_count() -> int:
    return _accelerator.count()


def current_device() -> int:
    _accelerator.accelerator()
    return 0


def get_device_name(device: Any = None) -> str:
    _accelerator.accelerator()
    return "GAUDI2"


def synchronize() -> None:
    _accelerator.accelerator().mark_step()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes."""
    accelerator = _accelerator.accelerator()
    return accelerator.total - accelerator.in_use, accelerator.total


def memory_stats(device: Any = None) -> dict[str, int]:
    accelerator = _accelerator.accelerator()
    return {"Limit": accelerator.total, "InUse": accelerator.in_use}


class Stream:
    """Work is in order on the fake card, whatever its stream."""

    def synchronize(self) -> None:
        synchronize()


class Event:
    def record(self, stream: Stream | None = None) -> None:
        """All that came before is done already."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        synchronize()


def default_stream(device: Any = None) -> Stream:
    return Stream()
