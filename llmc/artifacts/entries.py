"""Entries: which blobs a key was built into.

    entry = {"digest": sha256 of the canonical JSON of body, "entry": body}
    body  = {"schema": 1, "kind": str, "components": {name: value},
             "outputs": {name: {"digest": str, "size": int}}, "meta": {…}, "created": seconds since 1970}

An entry that is torn, altered, of another schema or filed under another key is never believed: it goes into
quarantine.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from llmc.artifacts.blobs import REMEDY, Blob
from llmc.artifacts.digest import PREFIX, digest_bytes, is_digest
from llmc.artifacts.key import Difference, Key, canonical_json
from llmc.artifacts.layout import Layout
from llmc.artifacts.publish import make_folder, write_atomic, writing

SCHEMA = 1
MAX_BYTES = 16 << 20
NEAREST_CANDIDATES = 64
NEAREST_SCANNED = 4096


class Entry(NamedTuple):
    """What a key was built into: named blobs, and facts about the build (JSON values)."""

    key: Key
    outputs: Mapping[str, Blob]
    meta: Mapping[str, Any]
    created: float
    used: float

    @property
    def size(self) -> int:
        """Bytes of all outputs."""
        return sum(blob.size for blob in self.outputs.values())


class Entries:
    """The entries of one layout. Reading does not raise for damage; writing raises as publish.py says."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.corrupt = 0

    def read(self, key: Key) -> Entry | None:
        """The entry of a key if there is a sound one; its blobs are not looked at."""
        return self.load(self._layout.entry(key.kind, key.hex), key.digest)

    def touch(self, key: Key) -> None:
        """Note that the entry was used now."""
        with suppress(OSError):
            os.utime(self._layout.entry(key.kind, key.hex))

    def write(self, key: Key, outputs: Mapping[str, Blob], meta: Mapping[str, Any]) -> Entry:
        """Publish an entry atomically. Raises ValueError or TypeError when `meta` is not JSON."""
        now = time.time()
        entry = Entry(key, dict(outputs), dict(meta), now, now)
        data = _encode(entry)
        path = self._layout.entry(key.kind, key.hex)
        with writing(path, len(data), REMEDY):
            make_folder(self._layout.temporaries)
            make_folder(path.parent)
            write_atomic(path, data, self._layout.temporaries)
        return entry

    def reject(self, key: Key, reason: str) -> None:
        """Put the entry of a key aside because of what was found about its blobs."""
        self._damaged(self._layout.entry(key.kind, key.hex), reason, None)

    def all(self, kind: str | None = None) -> Iterator[Entry]:
        """Every sound entry, or those of one kind, in no order."""
        for _, item in self._layout.all_entries(kind):
            if entry := self.load(Path(item.path), PREFIX + item.name[:64]):
                yield entry

    def nearest(self, key: Key) -> tuple[Entry, list[Difference]] | None:
        """The entry of the same kind with the fewest differing components, among the 64 used last.

        Looks at 4096 folder entries at most, so that a miss stays cheap in a big store.
        """
        recent: list[tuple[float, str]] = []
        for count, (_, item) in enumerate(self._layout.all_entries(key.kind)):
            if count == NEAREST_SCANNED:
                break
            with suppress(OSError):
                recent.append((item.stat().st_mtime, item.path))
        recent.sort(reverse=True)
        best: tuple[Entry, list[Difference]] | None = None
        for _, path in recent[:NEAREST_CANDIDATES]:
            entry = self.load(Path(path), f"{PREFIX}{Path(path).stem}")
            if entry is None or entry.key == key:
                continue
            found = key.explain(entry.key)
            if best is None or len(found) < len(best[1]):
                best = entry, found
        return best

    def load(self, path: Path, digest: str) -> Entry | None:
        """The entry in a file if it is sound and belongs to this key; else None, the file put aside."""
        try:
            with path.open("rb") as file:
                seen = os.fstat(file.fileno())
                data = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._damaged(path, f"cannot be read ({error.strerror})", None)
            return None
        try:
            entry = _decode(data, seen.st_mtime)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            self._damaged(path, f"not an entry ({type(error).__name__}: {error})", seen)
            return None
        if entry.key.digest != digest:
            self._damaged(path, f"belongs to key {entry.key.short}", seen)
            return None
        return entry

    def _damaged(self, path: Path, reason: str, seen: os.stat_result | None) -> None:
        self.corrupt += 1
        self._layout.set_aside(path, reason, seen)


def _encode(entry: Entry) -> bytes:
    body = {
        "schema": SCHEMA,
        "kind": entry.key.kind,
        "components": dict(entry.key.components),
        "outputs": {name: {"digest": blob.digest, "size": blob.size} for name, blob in entry.outputs.items()},
        "meta": entry.meta,
        "created": entry.created,
    }
    return canonical_json({"digest": digest_bytes(canonical_json(body)), "entry": body})


def _decode(data: bytes, used: float) -> Entry:
    """Raises ValueError, TypeError, KeyError, AttributeError or RecursionError for anything but an entry."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES} bytes")
    document = json.loads(data)
    body = document["entry"]
    if digest_bytes(canonical_json(body)) != document["digest"]:
        raise ValueError("content was altered")
    if body["schema"] != SCHEMA:
        raise ValueError(f"schema {body['schema']}, expected {SCHEMA}")
    outputs = {name: Blob(output["digest"], output["size"]) for name, output in body["outputs"].items()}
    if not all(is_digest(blob.digest) and type(blob.size) is int for blob in outputs.values()):
        raise ValueError("an output is not a blob")
    return Entry(Key(body["kind"], body["components"]), outputs, dict(body["meta"]), float(body["created"]), used)
