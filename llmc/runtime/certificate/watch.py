"""All witnesses over one run: what they saw before it was ready, and what since."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from llmc.runtime.certificate.witnesses.cache_files import CacheFileWitness
from llmc.runtime.certificate.witnesses.cache_places import cache_places, unkept
from llmc.runtime.certificate.witnesses.jax_events import LateJaxWitness
from llmc.runtime.certificate.witnesses.processes import ProcessWitness
from llmc.runtime.certificate.witnesses.torch_counters import TorchWitness

if TYPE_CHECKING:
    from llmc.runtime.executors.compilations import Witness
    from llmc.settings import Settings


@dataclass(frozen=True)
class Account:
    """What one witness says: how many it saw before the run was ready and since, None where it is blind; their names;
    and why something may have happened unseen, "" where nothing did."""

    witness: str
    before: int | None
    after: int | None
    names_before: tuple[str, ...] = ()
    names_after: tuple[str, ...] = ()
    blind: str = ""


def process_witnesses(settings: Settings, device: str) -> list[Witness]:
    """Those of the whole process, for a bundle of a device."""
    return [
        ProcessWitness(), CacheFileWitness(cache_places(settings, device), unkept()), TorchWitness(), LateJaxWitness(),
    ]  # fmt: skip


class Watch:
    """Lets witnesses look for as long as its `with` block lasts. `add` an executor's when it is open, in place of one
    of the same name; `ready` once everything is warm; then ask for `accounts`."""

    def __init__(self, witnesses: Sequence[Witness]) -> None:
        self._witnesses: list[Witness] = []
        self._ready: dict[str, tuple[int | None, int, str]] = {}
        self._first = list(witnesses)

    def __enter__(self) -> Watch:
        self.add(self._first)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        while self._witnesses:
            self._witnesses.pop().stop()

    def add(self, witnesses: Sequence[Witness]) -> None:
        """Let these look, too."""
        for witness in witnesses:
            for other in [w for w in self._witnesses if w.name == witness.name]:
                self._witnesses.remove(other)
                other.stop()
            witness.start()
            self._witnesses.append(witness)

    def ready(self) -> None:
        """What is seen from now on counts."""
        for witness in self._witnesses:
            names = len(witness.what())
            self._ready[witness.name] = witness.count(), names, witness.blind()

    @property
    def blinded(self) -> list[str]:
        """Witnesses that saw when it was ready, and do not any more, with the reason."""
        return [f"{w.name}: {why}" for w in self._witnesses if not self._ready[w.name][2] and (why := w.blind())]

    def accounts(self) -> list[Account]:
        """What each says until now. Raises RuntimeError before `ready`."""
        if not self._ready:
            raise RuntimeError("nothing is ready yet")
        return [self._account(witness) for witness in self._witnesses]

    def _account(self, witness: Witness) -> Account:
        before, named, _ = self._ready[witness.name]
        names = tuple(witness.what())
        count, blind = witness.count(), witness.blind()
        after: int | None = (count or 0) - (before or 0)
        if not after and blind:
            after = None
        return Account(witness.name, before, after, names[:named], names[named:], blind)
