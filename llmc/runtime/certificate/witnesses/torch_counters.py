"""What torch.compile counts of itself: graphs that TorchDynamo captured, and the work of Inductor and AOTAutograd.

torch 2.13, torch/_dynamo/utils.py: `counters`, names and numbers by group. Whoever clears them makes this witness
blind. A process that did not import TorchDynamo compiled nothing with it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from llmc.runtime.executors.compilations import Witness

_MODULE = "torch._dynamo.utils"


class TorchWitness(Witness):
    """See the module's docstring."""

    name = "torch.compile counters"

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._seen: list[str] = []
        self._cleared = False

    def start(self) -> None:
        """Remember the counters."""
        self._last = _counters()

    def what(self) -> Sequence[str]:
        """The counters that grew, with how much."""
        now = _counters()
        if any(now.get(name, 0) < before for name, before in self._last.items()):
            self._cleared = True
        for name, value in now.items():
            if (grown := value - self._last.get(name, 0)) > 0:
                self._seen.append(f"{name} +{grown}")
        self._last = now
        return tuple(self._seen)

    def blind(self) -> str:
        """Once the counters were cleared."""
        return "somebody cleared the counters" if self._cleared else ""


def _counters() -> dict[str, int]:
    counters = getattr(sys.modules.get(_MODULE), "counters", {})
    return {f"{group}.{name}": value for group, of in list(counters.items()) for name, value in list(of.items())}
