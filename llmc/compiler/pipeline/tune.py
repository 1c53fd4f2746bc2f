"""Tune a bundle on its device's own host by timing the matmuls of each executable.

Results go into the store and, if one is named, a file, after each executable: an interrupt loses at most one.
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
from llmc.compiler.targets.tuning import RESULTS, STAGE, Results, Tuner, read_results, write_results
from llmc.errors import DeviceError, InputError

if TYPE_CHECKING:
    from llmc.artifacts.store.store import Store
    from llmc.runtime.bundle import Bundle

Reported = Callable[[str, int, int], None]
"""Called for each finished executable: how, its number, of how many."""


@dataclass(frozen=True)
class TuneResult:
    """Outcome: `results` counts matmuls with a result, and `new` those without an earlier one.

    `digest` names them in the store, None without any. `tuned` of `executables` are finished. Time is in seconds.
    """

    bundle: str
    device: str
    built_for: dict[str, str]
    results: int
    new: int
    executables: int
    tuned: int
    digest: str | None
    file: str | None
    seconds: float

    @property
    def interrupted(self) -> bool:
        """Whether some executables are left."""
        return self.tuned < self.executables

    def to_json(self) -> dict[str, Any]:
        """The result for --json."""
        return asdict(self)


def tuner_of(bundle: Bundle) -> Tuner:
    """The tuner of a bundle on this host. Raises InputError for a device without one, DeviceError where this host lacks
    its GPU or compiler."""
    device = bundle.manifest.device
    tuner = target_of(bundle.manifest).tuner()
    if tuner is None:
        raise InputError(f"{bundle.path}: device {device} has nothing to tune: its compiler does not choose by timing")
    if lacks := tuner.lacks():
        raise DeviceError(f"tuning for {device} needs {lacks}")
    return tuner


def tune_bundle(bundle: Bundle, store: Store, file: Path | None, reported: Reported) -> TuneResult:
    """Tune all executables; known results of an existing file are kept and not timed again.

    An interrupt ends it with the results so far. Raises the errors of `tuner_of`, ArtifactError for a file of another
    GPU or compiler, CompileError, and CapacityError or UnwritableError where results cannot be kept.
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
        pass  # the result says what is left
    found = known or Results({})
    return TuneResult(
        str(bundle.path), bundle.manifest.device, dict(found.built_for), len(found.found),
        len(found.found.keys() - before), len(executables), tuned, digest, None if file is None else str(file),
        round(time.perf_counter() - began, 3),
    )  # fmt: skip


def _keep(results: Results, store: Store, file: Path | None) -> str:
    data = write_results(results)
    digest = digest_bytes(data)
    if file is not None:
        write_atomic(file, data, file.parent)
    key = Key(STAGE, {"results": digest})
    store.publish(key, {RESULTS: store.put_bytes(data)}, {"built_for": dict(results.built_for)})
    return digest
