"""The folder of a loop.

<folder>/current            a link to the bundle that is served
<folder>/bundles/<12 hex>   a bundle, by its plan's digest; the newest two stay
<folder>/last.prom          the scrape that ended the last round
<folder>/now.prom           that and a scrape of now: what the server was asked in between
<folder>/loop.jsonl         the log: one object a round (`rounds.Round`)
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from llmc.artifacts.atomic_write import temporary_name, write_atomic
from llmc.artifacts.flock import flock
from llmc.buckets.traffic.formats.prometheus.exposition import samples
from llmc.buckets.traffic.formats.prometheus.increase import Increase
from llmc.errors import InputError

KEPT = 2


class Folder:
    """What a loop keeps between its rounds. A kill at any time leaves all of it whole."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.abspath(path))  # noqa: PTH100 - links are the user's business
        self.current, self.log, self.now = self.path / "current", self.path / "loop.jsonl", self.path / "now.prom"
        self._bundles, self._last = self.path / "bundles", self.path / "last.prom"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other loops out. Raises InputError where one holds it, and OSError."""
        self._bundles.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if flock(fd) is False:
                raise InputError(f"{self.path}: another llmc loop works here; give each a folder of its own with -o")
            yield
        finally:
            os.close(fd)

    def bundle(self, plan_digest: str) -> Path:
        """Where the bundle of a plan lies."""
        return self._bundles / plan_digest[:12]

    def scraped(self, metrics: str) -> Path | None:
        """A file of what came since the last round, by a scrape of now; None where nothing did. Raises InputError for
        what is no scrape."""
        before = self._last.read_text() if self._last.exists() else ""
        found = Increase(str(self.now))
        for scrape in (before, metrics) if before else (metrics,):
            found.add(samples(scrape.split("\n")))
        if not found.requests:
            return None
        write_atomic(self.now, (before + metrics).encode(), self.path)
        return self.now

    def over(self, metrics: str | None, line: Mapping[str, Any]) -> None:
        """A round is over: log it, and let the next one begin behind this scrape."""
        with self.log.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if metrics is not None:
            write_atomic(self._last, metrics.encode(), self.path)

    def point(self, bundle: Path) -> None:
        """Let `current` name `bundle`."""
        with suppress(OSError):
            if self.current.readlink() == bundle:
                return
        fresh = temporary_name(self.path)
        fresh.symlink_to(bundle)
        fresh.replace(self.current)

    def trim(self, *used: Path) -> None:
        """Remove bundles but `used` and the newest KEPT."""
        found = sorted(self._bundles.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for bundle in found[KEPT:]:
            if bundle not in used:
                shutil.rmtree(bundle, ignore_errors=True)
