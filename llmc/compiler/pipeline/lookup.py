"""Stages that are looked up and never run: what of a compile is in the store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmc.artifacts.key import Key
from llmc.compiler.stages import StageReport, Stages
from llmc.errors import LlmcError

if TYPE_CHECKING:
    from llmc.artifacts.store.entries import Entry


class NotBuiltError(LlmcError):
    """A stage that has to run."""


class LookupStages(Stages):
    """The first stage that is missing ends the walk (NotBuiltError); `found` are those before it."""

    def __init__(self, stages: Stages) -> None:
        super().__init__(stages.store, stages.checkpoint, stages.plan, ignore)
        self.found: set[str] = set()

    def run(self, kind: str, components: Mapping[str, Any], build: object) -> Entry:
        """The entry that the store has."""
        key = Key(kind, components)
        entry = self.store.lookup(key)
        if entry is None:
            raise NotBuiltError(f"stage {kind} has to run: {self.store.why(key)}")
        self.found.add(kind)
        return entry


def ignore(_: StageReport) -> None:
    """Tell nobody."""
