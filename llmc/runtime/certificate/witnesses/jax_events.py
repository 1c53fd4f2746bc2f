"""JAX's compilations where JAX is no part of the executor: whatever else runs in the process."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from llmc.runtime.executors.compilations import Witness
from llmc.runtime.executors.xla import client


class LateJaxWitness(Witness):
    """Sees JAX's compilations if JAX is imported when it starts; if it is later, nobody heard what came first."""

    name = client.JaxWitness.name

    def __init__(self) -> None:
        self._heard: client.JaxWitness | None = None

    def start(self) -> None:
        """Listen, without importing JAX."""
        if "jax" in sys.modules:
            client.listen()
        if client.listens():
            self._heard = client.JaxWitness()

    def what(self) -> Sequence[str]:
        """The programs."""
        return () if self._heard is None else self._heard.what()

    def blind(self) -> str:
        """Where JAX came in the middle."""
        return "JAX was imported in the middle" if self._heard is None and "jax" in sys.modules else ""
