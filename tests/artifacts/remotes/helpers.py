"""What the tests of remotes share: small stores, fakes of signatures, a remote with faults, a proxy that breaks."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from llmc.artifacts.bundle.stored import publish_bundle
from llmc.artifacts.bundle.trust import UntrustedError
from llmc.artifacts.digest import Blob, digest_bytes
from llmc.artifacts.key import Key
from llmc.artifacts.remotes.base import Progress, Remote, blob_name, entry_name
from llmc.artifacts.remotes.folder import FolderRemote
from llmc.artifacts.remotes.retry import Patience
from llmc.artifacts.store.entries import Entry
from llmc.artifacts.store.store import Store
from tests.artifacts.helpers import CONTENT, key, manifest

BRIEF = Patience(attempts=4, seconds=20, first=0.01, longest=0.02)
CREDENTIALS = ("testkey", "testsecret")


def native_key(**components: str | int) -> Key:
    return key(state="native", **components)


def fill(store: Store, count: int = 3, size: int = 1000) -> list[Entry]:
    """Entries with a blob of their own and one they share."""
    shared = store.put_bytes(b"shared" * 50)
    return [
        store.publish(key(number=n), {"graph": store.put_bytes(b"%d" % n * size), "shared": shared}, {"n": n})
        for n in range(count)
    ]


def add_manifest(store: Store, signature: bytes | None = None, **changes: object) -> Entry:
    """A bundle in a store: native executables, unless changed."""
    for data in CONTENT.values():
        store.put_bytes(data)
    return publish_bundle(store, manifest(**changes), signature)


def file_of(far: Path, entry: Entry, output: str | None = None) -> Path:
    """The file of an entry, or of one of its blobs, in a remote that is a folder."""
    return far / (entry_name(entry.key) if output is None else blob_name(entry.outputs[output].digest))


class FakeSigner:
    def __init__(self, name: str = "alice") -> None:
        self.name = name

    def sign(self, content: bytes, existing: bytes | None = None) -> bytes:
        names = {self.name}
        if existing is not None:
            envelope = json.loads(existing)
            if envelope["of"] != digest_bytes(content):
                raise UntrustedError("the existing signature is of other content")
            names |= set(envelope["by"])
        return json.dumps({"by": sorted(names), "of": digest_bytes(content)}, separators=(",", ":")).encode()


class FakeTrust:
    """Trusts signatures by some names; remembers what it was asked."""

    def __init__(self, *names: str, allow: bool = False) -> None:
        self.names = names
        self.allow = allow
        self.requested: list[str] = []

    def require(self, content: bytes, signature: bytes | None, *, native: bool, origin: str) -> str | None:
        self.requested.append(origin)
        if signature is not None:
            envelope = json.loads(signature)
            if envelope["of"] != digest_bytes(content):
                raise UntrustedError(f"{origin}: its signature is not valid")
            for name in envelope["by"]:
                if name in self.names:
                    return str(name)
        if native and not self.allow:
            raise UntrustedError(f"{origin}: native code is not signed; sign it, or take it with --allow-unsigned")
        return None


class Watched:
    """A folder as a remote, with every call noted, and a hook before each."""

    def __init__(self, folder: Path, before: Callable[[str, str], None] = lambda verb, name: None) -> None:
        self._inner: Remote = FolderRemote(str(folder))
        self._before = before
        self.calls: list[tuple[str, str]] = []
        self.url = "watched"

    def names(self, verb: str) -> list[str]:
        return [name for called, name in self.calls if called == verb]

    def _note(self, verb: str, name: str) -> None:
        self.calls.append((verb, name))
        self._before(verb, name)

    def size(self, name: str) -> int | None:
        self._note("size", name)
        return self._inner.size(name)

    def read(self, name: str, limit: int) -> bytes | None:
        self._note("read", name)
        return self._inner.read(name, limit)

    def download(self, name: str, start: int, size: int) -> Iterator[bytes]:
        self._note("download", name)
        return self._inner.download(name, start, size)

    def upload(self, name: str, source: Path | bytes, progress: Progress) -> None:
        self._note("upload", name)
        self._inner.upload(name, source, progress)

    def list(self, prefix: str) -> Iterator[str]:
        self._note("list", prefix)
        return self._inner.list(prefix)

    def delete(self, name: str) -> None:
        self._note("delete", name)
        self._inner.delete(name)


class Pieces:
    """A remote of one blob, handed out in pieces from `start`, as a server would that is cut off or lies."""

    url = "pieces"

    def __init__(self, data: bytes, piece: int = 100, cut: int | None = None, error: Exception | None = None) -> None:
        self.data = data
        self.starts: list[int] = []
        self._piece = piece
        self._cut = cut
        self._error = error

    def download(self, name: str, start: int, size: int) -> Iterator[bytes]:
        self.starts.append(start)
        for at in range(start, len(self.data), self._piece):
            if self._cut is not None and at >= self._cut and self._error is not None:
                raise self._error
            yield self.data[at : at + self._piece]

    def size(self, name: str) -> int | None:
        raise NotImplementedError

    def read(self, name: str, limit: int) -> bytes | None:
        raise NotImplementedError

    def upload(self, name: str, source: Path | bytes, progress: Progress) -> None:
        raise NotImplementedError

    def list(self, prefix: str) -> Iterator[str]:
        raise NotImplementedError

    def delete(self, name: str) -> None:
        raise NotImplementedError


def blob_of(data: bytes) -> Blob:
    return Blob(digest_bytes(data), len(data))


class Proxy:
    """A TCP proxy on loopback that counts, and breaks on demand.

    `drop_after` is how many bytes a connection may carry from the server before it is cut, for the next `drops`
    connections that reach it; `refusing` closes each connection; `pause` slows what comes from the server.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.reset()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def reset(self) -> None:
        """As new, but for connections that are open."""
        self.received = self.sent = self.dropped = self.drops = 0
        self.drop_after: int | None = None
        self.drop_sent_after: int | None = None
        self.refusing = False
        self.pause = 0.0

    def close(self) -> None:
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            if self.refusing:
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            for source, target, upward in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._pump, args=(source, target, upward), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, upward: bool) -> None:
        carried = 0
        try:
            while data := source.recv(1 << 16):
                carried += len(data)
                with self._lock:
                    limit = self.drop_sent_after if upward else self.drop_after
                    drop = limit is not None and carried > limit and self.drops > 0
                    if drop:
                        self.drops -= 1
                        self.dropped += 1
                    elif upward:
                        self.sent += len(data)
                    else:
                        self.received += len(data)
                if drop or self.refusing:
                    break
                if self.pause and not upward:
                    time.sleep(self.pause)
                target.sendall(data)
        except OSError:
            pass
        finally:
            for end in (source, target):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
