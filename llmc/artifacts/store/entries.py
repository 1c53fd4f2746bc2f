"""Entries: which blobs a key was built into.

    entry = {"digest": sha256 of the canonical JSON of body, "entry": body[, "signature": envelope]}
    body  = {"schema": 1, "kind": str, "components": {name: value},
             "outputs": {name: {"digest": str, "size": int}}, "meta": {…}, "created": seconds since 1970}

    envelope: see signing/envelope.py; it signs the canonical JSON of body, and is kept unchanged

An entry that is torn, altered, of another schema or filed under another key is quarantined.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from llmc.artifacts.atomic_write import make_folder, write_atomic, writing
from llmc.artifacts.digest import PREFIX, Blob, NotRegularError, digest_bytes, is_digest, open_regular
from llmc.artifacts.key import Difference, Key, canonical_json
from llmc.artifacts.log import logger
from llmc.artifacts.store.blobs import REMEDY
from llmc.artifacts.store.layout import Layout

SCHEMA = 1
MAX_BYTES = 16 << 20
NEAREST_CANDIDATES = 256
NEAREST_SCANNED = 4096
_REQUESTED = ("shape.", "bucket")
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EACCES})


class Entry(NamedTuple):
    """The result of building a key: named blobs, and facts about the build (JSON values)."""

    key: Key
    outputs: Mapping[str, Blob]
    meta: Mapping[str, Any]
    created: float
    used: float
    signature: Mapping[str, Any] | None = None

    @property
    def envelope(self) -> bytes | None:
        """The signature as the content of a signature file."""
        return None if self.signature is None else canonical_json(self.signature)

    @property
    def size(self) -> int:
        """Total bytes of all outputs."""
        return sum(blob.size for blob in self.outputs.values())


class Entries:
    """The entries of one layout. Reading does not raise for damage; writing raises as atomic_write.py describes."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._problems: dict[str, str] = {}
        self._recent: dict[str, tuple[int, list[Entry]]] = {}
        self.corrupt = 0

    def read(self, key: Key) -> Entry | None:
        """Return the entry of a key if it is sound; its blobs are not checked."""
        return self.load(self._layout.entry(key.kind, key.hex), key.digest)

    def touch(self, key: Key) -> None:
        """Mark the entry as used now."""
        if self._layout.read_only:
            return
        with suppress(OSError):
            os.utime(self._layout.entry(key.kind, key.hex))

    def write(
        self, key: Key, outputs: Mapping[str, Blob], meta: Mapping[str, Any], created: float | None = None
    ) -> Entry:  # fmt: skip
        """Publish an entry atomically. Raises ValueError or TypeError if `meta` is not JSON."""
        now = time.time()
        return self.adopt(Entry(key, dict(outputs), dict(meta), now if created is None else created, now))

    def adopt(self, entry: Entry) -> Entry:
        """Publish an entry from elsewhere, unchanged; its blobs must exist already."""
        key = entry.key
        data = encode_entry(entry)
        path = self._layout.entry(key.kind, key.hex)
        with writing(path, len(data), REMEDY):
            make_folder(self._layout.temporaries)
            make_folder(path.parent)
            write_atomic(path, data, self._layout.temporaries)
        self._problems.pop(key.hex, None)
        return entry

    def reject(self, entry: Entry, reason: str) -> None:
        """Quarantine an entry because of its blobs, unless it was replaced since it was read."""
        path = self._layout.entry(entry.key.kind, entry.key.hex)
        with suppress(OSError):
            seen = path.stat()
            if (now := self.read(entry.key)) is not None and entry_body(now) == entry_body(entry):
                self._damaged(path, reason, seen)

    def all(self, kind: str | None = None) -> Iterator[Entry]:
        """Yield every sound entry, or those of one kind, in no order."""
        for _, item in self._layout.all_entries(kind):
            if entry := self.load(Path(item.path), PREFIX + item.name[:64]):
                yield entry

    def problem(self, key: Key) -> str | None:
        """Return why this object quarantined the key's entry, unless it has written it again."""
        return self._problems.get(key.hex)

    def nearest(self, key: Key) -> tuple[Entry, list[Difference]] | None:
        """Return the entry of the same kind with the fewest differing components.

        Of equally near entries, one of the same shape or bucket wins, because then only its inputs differ; of these,
        the one used last. Only the 256 used last are candidates, of 4096 that are scanned, so that a miss stays cheap
        in a big store.
        """
        found = [(entry, key.explain(entry.key)) for entry in self._candidates(key.kind) if entry.key != key]
        return min(
            found, key=lambda pair: (len(pair[1]), sum(d.name.startswith(_REQUESTED) for d in pair[1])), default=None
        )

    def _candidates(self, kind: str) -> list[Entry]:
        """Return the last used entries of a kind, newest first; read again after one was added or removed."""
        try:
            changed = (self._layout.entries / kind).stat().st_mtime_ns
        except OSError:
            return []
        known = self._recent.get(kind)
        if known is None or known[0] != changed:
            seen: list[tuple[float, str]] = []
            for _, item in islice(self._layout.all_entries(kind), NEAREST_SCANNED):
                with suppress(OSError):
                    seen.append((item.stat().st_mtime, item.path))
            paths = [Path(path) for _, path in sorted(seen, reverse=True)[:NEAREST_CANDIDATES]]
            entries = [entry for path in paths if (entry := self.load(path, PREFIX + path.stem)) is not None]
            known = self._recent[kind] = changed, entries
        return known[1]

    def load(self, path: Path, digest: str) -> Entry | None:
        """Return the entry in a file if it is sound and belongs to this key; otherwise quarantine the file."""
        try:
            with open_regular(path) as file:
                seen = os.fstat(file.fileno())
                data = file.read(MAX_BYTES + 1)
        except NotRegularError:
            self._damaged(path, "not a regular file", None)
            return None
        except OSError as error:
            if error.errno == errno.ENOENT and path.is_symlink():
                self._damaged(path, "a link that leads nowhere", None)
            elif error.errno not in _ABSENT:
                logger().warning("%s: cannot be read (%s); counted as a miss", path, error.strerror)
            return None
        try:
            entry = decode_entry(data, seen.st_mtime)
        except ValueError as error:
            self._damaged(path, f"not an entry ({error})", seen)
            return None
        if entry.key.digest != digest:
            self._damaged(path, f"belongs to key {entry.key.short}", seen)
            return None
        return entry

    def _damaged(self, path: Path, reason: str, seen: os.stat_result | None) -> None:
        self.corrupt += 1
        self._problems[path.stem] = reason
        self._layout.set_aside(path, reason, seen)


def entry_body(entry: Entry) -> bytes:
    """Return the canonical JSON of an entry's body, which its digest and its signature cover."""
    body = {
        "schema": SCHEMA,
        "kind": entry.key.kind,
        "components": dict(entry.key.components),
        "outputs": {name: {"digest": blob.digest, "size": blob.size} for name, blob in entry.outputs.items()},
        "meta": entry.meta,
        "created": entry.created,
    }
    return canonical_json(body)


def encode_entry(entry: Entry) -> bytes:
    """Return the content of an entry's file. Raises ValueError or TypeError if its `meta` is not JSON."""
    body = entry_body(entry)
    document = {"digest": digest_bytes(body), "entry": json.loads(body)}
    if entry.signature is not None:
        document["signature"] = entry.signature
    return canonical_json(document)


def decode_entry(data: bytes, used: float = 0.0) -> Entry:
    """Parse the content of an entry's file. Raises ValueError, and nothing else, for anything but a sound entry."""
    try:
        return _decode(data, used)
    except (TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _decode(data: bytes, used: float) -> Entry:
    if len(data) > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES} bytes")
    document = json.loads(data)
    if unknown := document.keys() - {"digest", "entry", "signature"}:
        raise ValueError(f"unknown member {min(unknown)!r:.80}")
    body = document["entry"]
    if digest_bytes(canonical_json(body)) != document["digest"]:
        raise ValueError("content was altered")
    if body["schema"] != SCHEMA:
        raise ValueError(f"schema {body['schema']}, expected {SCHEMA}")
    outputs = {name: Blob(output["digest"], output["size"]) for name, output in body["outputs"].items()}
    if not all(is_digest(blob.digest) and type(blob.size) is int and blob.size >= 0 for blob in outputs.values()):
        raise ValueError("an output is not a blob")
    signature = document.get("signature")
    if signature is not None and not isinstance(signature, dict):
        raise ValueError("its signature is not an object")
    key = Key(body["kind"], body["components"])
    return Entry(key, outputs, dict(body["meta"]), float(body["created"]), used, signature)
