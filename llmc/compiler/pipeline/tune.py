"""Tune a bundle on its device's own host: each executable's products are timed there, and the results are kept in the
store and, if one is named, in a file, after each executable, so that an interrupt loses one at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.artifacts.atomic_write import write_atomic
from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import Key
from llmc.compiler.pipeline.resolve import target_of
from llmc.compiler.targets.tuning import RESULTS, STAGE, Results, read_results, write_results
from llmc.errors import DeviceError, InputError

if TYPE_CHECKING:
    from llmc.artifacts.store.store import Store
    from llmc.compiler.targets.tuning import Tuner
    from llmc.runtime.bundle import Bundle

Reported = Callable[[str, int, int], None]
"""Hears of each executable that is done: how, its number, of how many."""


@dataclass(frozen=True)
class TuneResult:
    """Outcome: `results` is how many products have a result, `new` how many of them had none before; `digest` names
    them in the store, None where there are none. `tuned` of `executables` were done; time in seconds."""

    bundle: str
    device: str
    made_for: dict[str, str]
    results: int
    new: int
    executables: int
    tuned: int
    digest: str | None
    file: str | None
    seconds: float

    @property
    def interrupted(self) -> bool:
        """Whether some are left."""
        return self.tuned < self.executables

    def to_json(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def tuner_of(bundle: Bundle) -> Tuner:
    """What tunes a bundle here. Raises InputError for a device that has none, DeviceError where this host lacks its
    card or compiler."""
    device = bundle.manifest.device
    tuner = target_of(bundle.manifest).tuner()
    if tuner is None:
        raise InputError(f"{bundle.path}: device {device} has nothing to tune: its compiler does not choose by timing")
    if lacks := tuner.lacks():
        raise DeviceError(f"tuning for {device} needs {lacks}")
    return tuner


def tune_bundle(bundle: Bundle, store: Store, file: Path | None, reported: Reported) -> TuneResult:
    """Tune all executables; a file that exists is added to, and what it knows is not timed again. An interrupt ends it
    with what was found.

    Raises what `tuner_of` does, ArtifactError for a file of another card or compiler, CompileError, and CapacityError
    or UnwritableError where results cannot be kept.
    """
    began, tuner = time.perf_counter(), tuner_of(bundle)
    known = read_results(file) if file is not None and file.exists() else None
    before, tuned, digest = known.found.keys() if known else set[str](), 0, None
    executables = bundle.manifest.executables
    try:
        for number, executable in enumerate(executables, 1):
            had, start = len(known.found) if known else 0, time.perf_counter()
            known = tuner.tune(bundle, executable, known)
            digest = None if known is None else _keep(known, store, file)
            tuned, has = number, len(known.found) if known else 0
            reported(f"{executable}: {has - had} new, {time.perf_counter() - start:.1f} s", number, len(executables))
    except KeyboardInterrupt:
        pass  # the caller sees what is left
    found = known or Results({})
    return TuneResult(
        str(bundle.path), bundle.manifest.device, dict(found.made_for), len(found.found),
        len(found.found.keys() - before), len(executables), tuned, digest, None if file is None else str(file),
        round(time.perf_counter() - began, 3),
    )  # fmt: skip


def _keep(results: Results, store: Store, file: Path | None) -> str:
    """The digest under which the store has them."""
    data = write_results(results)
    digest = digest_bytes(data)
    if file is not None:
        write_atomic(file, data, file.parent)
    key = Key(STAGE, {"results": digest})
    store.publish(key, {RESULTS: store.put_bytes(data)}, {"made_for": dict(results.made_for)})
    return digest
