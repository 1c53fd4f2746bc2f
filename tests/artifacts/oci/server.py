"""A registry on loopback that serves a layout, and lies, stumbles or asks for a token as a test wants."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.oci import parse_reference
from llmc.artifacts.oci.registry import RegistryImages
from llmc.artifacts.oci.transfer import pull, push
from llmc.artifacts.remotes.retry import Patience
from llmc.artifacts.store.store import Store
from tests.artifacts.oci.helpers import Anyone, blob_file

QUICK = Patience(attempts=3, seconds=20, first=0.01, longest=0.05)
Answer = Callable[["Handler"], bool]


class Server(ThreadingHTTPServer):
    """Serves the images of one layout; `answers` come first, and say whether they answered."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.answers: list[Answer] = []
        self.seen: list[str] = []
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, *_: Any) -> None:
        """A client that hangs up is what many tests are about."""

    @property
    def reference(self) -> str:
        return f"oci://127.0.0.1:{self.server_port}/x:v1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def reply(self, status: int, body: bytes = b"", **headers: str) -> bool:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        return True

    def do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen.append(f"{self.command} {self.path}")
        if any(answer(self) for answer in list(self.server.answers)):
            return
        part = self.path.rpartition("/")[2]
        if self.command == "POST":
            self.reply(202, Location="/v2/x/blobs/uploads/1?state=s")
        elif self.command == "PUT":
            self.reply(201, Docker_Content_Digest=digest_bytes(body))
        elif (path := self.find(part)) is None:
            self.reply(404, b'{"errors": [{"code": "BLOB_UNKNOWN", "message": "m"}]}')
        else:
            self.content(path.read_bytes())

    do_GET = do_HEAD = do_POST = do_PUT = do

    def find(self, part: str) -> Path | None:
        if not part.startswith("sha256:"):
            index = self.server.folder / "index.json"
            part = json.loads(index.read_bytes())["manifests"][0]["digest"] if index.exists() else "sha256:none"
        path = blob_file(self.server.folder, part)
        return path if path.is_file() else None

    def content(self, data: bytes) -> None:
        start = int(self.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
        if start:
            self.reply(206, data[start:], Content_Range=f"bytes {start}-{len(data) - 1}/{len(data)}")
        else:
            self.reply(200, data)


def pull_it(server: Server, tmp_path: Path) -> Store:
    store = Store(tmp_path / "other")
    location = parse_reference(server.reference)
    with closing(RegistryImages(location, QUICK)) as images:
        pull(store, images, location, trust=Anyone(), jobs=2, progress=None)
    return store


def push_it(server: Server, store: Store) -> None:
    location = parse_reference(server.reference)
    with closing(RegistryImages(location, QUICK)) as images:
        push(store, store.entries()[0], images, location, jobs=2, signer=None, progress=None)


def times(count: int, answer: Answer, part: str = "") -> Answer:
    """An answer that is given so many times, to requests that have `part` in them."""
    left = [count]

    def limited(handler: Handler) -> bool:
        if part not in f"{handler.command} {handler.path}" or not left[0]:
            return False
        left[0] -= 1
        return answer(handler)

    return limited


def half(handler: Handler) -> bool:
    """Half of a blob, and then the line is cut."""
    path = handler.find(handler.path.rpartition("/")[2])
    assert path is not None
    data = path.read_bytes()
    handler.close_connection = True
    return handler.reply(200, data[: len(data) // 2], Content_Length=str(len(data)))
