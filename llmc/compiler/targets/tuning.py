"""The contract of tuning: on its own host, a device's compiler times ways to compute a graph's products, and a compile
on any other host takes the fastest.

A target whose compiler can has a `Tuner` (`Target.tuner`). pipeline/tune.py has it tune a bundle's executables one by
one, and keeps what it finds in the store and in a file (targets/tuning_file.py). Keys and results are the compiler's
own; nothing above a target reads them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmc.errors import ArtifactError

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest_schema import Executable
    from llmc.runtime.bundle import Bundle


STAGE = "tuning"
"""Kind of the entries of a store that hold results. Their key is the digest of the file, `results`."""

RESULTS = "results.json"
"""The output of such an entry."""


@dataclass(frozen=True)
class Results:
    """What was found: `found` has the compiler's result for each of its keys. `made_for` says what it holds for, by
    name: card, compiler … ."""

    made_for: Mapping[str, str]
    found: Mapping[str, bytes] = field(default_factory=dict)

    def merged(self, newer: Results) -> Results:
        """With what `newer` found, which counts where both know a key. Raises ArtifactError for results of another
        card or compiler, naming what differs."""
        names = sorted(self.made_for.keys() | newer.made_for.keys())
        mine, theirs = self.made_for, newer.made_for
        differ = [
            f"{n} {mine.get(n, 'none')}, not {theirs.get(n, 'none')}" for n in names if mine.get(n) != theirs.get(n)
        ]
        if differ:
            raise ArtifactError(
                f"these results cannot be merged: one is of {'; of '.join(differ)}; keep a file for each"
            )
        return Results(self.made_for, {**self.found, **newer.found})


class Tuner(ABC):
    """What tunes on the device's own host."""

    @abstractmethod
    def lacks(self) -> str:
        """What this host lacks to tune, in words, with the line that installs it or where to go; "" if nothing."""

    @abstractmethod
    def tune(self, bundle: Bundle, executable: Executable, known: Results | None) -> Results | None:
        """`known` with the results for the products of one executable of `bundle`, which are not timed again where
        `known` has them; None where nothing is known, and the executable has no products.

        Raises CompileError with the compiler's own words, DeviceError, and ArtifactError where `known` is of another
        card or compiler.
        """
