"""Registries that misbehave: what comes in is right all the same, and the error says what was wrong."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from llmc.artifacts.oci import image, parse_reference
from llmc.artifacts.oci.registry import RegistryImages
from llmc.artifacts.remotes.base import RemoteError
from llmc.artifacts.store.store import Store
from llmc.errors import ArtifactError
from tests.artifacts.oci.helpers import read_layout
from tests.artifacts.oci.server import QUICK, Answer, Handler, Server, half, pull_it, push_it, times


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_busy_registry_is_requested_again(server: Server, tmp_path: Path, status: int) -> None:
    server.answers.append(times(2, lambda handler: handler.reply(status)))
    assert pull_it(server, tmp_path).entries()


@pytest.mark.parametrize(("status", "match"), [(400, "status 400"), (404, "no such bundle"), (418, "status 418")])
def test_an_error_that_lasts_is_not_requested_again(server: Server, tmp_path: Path, status: int, match: str) -> None:
    server.answers.append(lambda handler: handler.reply(status))
    with pytest.raises(ArtifactError, match=match):
        pull_it(server, tmp_path)
    assert len(server.seen) == 1


def test_a_manifest_is_sent_again_while_another_push_writes_the_link_of_a_blob(server: Server, store: Store) -> None:
    torn = b'{"errors": [{"code": "DIGEST_INVALID"}]}'
    server.answers.append(times(99, lambda handler: handler.reply(404), "HEAD"))
    server.answers.append(times(2, lambda handler: handler.reply(400, torn), "PUT /v2/x/manifests/"))
    push_it(server, store)
    assert sum(request.startswith("PUT /v2/x/manifests/") for request in server.seen) == 3


def test_a_registry_that_stays_broken_is_an_error_with_its_code(server: Server, tmp_path: Path) -> None:
    body = b'{"errors": [{"code": "TOOMANYREQUESTS", "message": "secret"}]}'
    server.answers.append(lambda handler: handler.reply(429, body))
    with pytest.raises(RemoteError, match=r"status 429, TOOMANYREQUESTS\).*try again later"):
        pull_it(server, tmp_path)
    assert len(server.seen) == QUICK.attempts


def test_a_blob_goes_on_from_the_byte_it_broke_at(server: Server, tmp_path: Path) -> None:
    ranges: list[str | None] = []

    def note(handler: Handler) -> bool:
        if "/blobs/" in handler.path:
            ranges.append(handler.headers.get("Range"))
        return False

    weights = read_layout(tmp_path / "images")[0]["layers"][0]["digest"]
    server.answers += [note, times(1, half, weights)]
    assert pull_it(server, tmp_path).entries()
    (begun,) = [text for text in ranges if text]
    assert int(begun.removeprefix("bytes=").partition("-")[0]) >= 384 << 10


def test_a_registry_without_ranges_is_read_from_the_beginning(server: Server, tmp_path: Path) -> None:
    def whole(handler: Handler) -> bool:
        path = handler.find(handler.path.rpartition("/")[2])
        assert path is not None
        return handler.reply(200, path.read_bytes())

    weights = read_layout(tmp_path / "images")[0]["layers"][0]["digest"]
    server.answers += [times(1, half, weights), times(99, whole, "/blobs/")]
    assert pull_it(server, tmp_path).entries()


@pytest.mark.parametrize(
    "answer",
    [
        lambda handler: handler.reply(206, b"x" * 10, Content_Range="bytes 3-12/13"),
        lambda handler: handler.reply(200, b"x" * 10),
        lambda handler: handler.reply(200, b""),
        lambda handler: handler.reply(200, b"x" * (4 << 20)),
        lambda handler: handler.reply(200, b"x" * 10, Content_Encoding="gzip"),
        lambda handler: handler.reply(404),
        lambda handler: handler.reply(302, Location="http://[bad"),
        lambda handler: handler.reply(302, Location="/v2/x/again" + handler.path),
    ],
)
def test_wrong_bytes_for_a_blob_never_come_in(server: Server, tmp_path: Path, answer: Answer) -> None:
    server.answers.append(times(999, answer, "/blobs/"))
    with pytest.raises(ArtifactError) as caught:
        pull_it(server, tmp_path)
    assert "\n" not in str(caught.value)
    assert Store(tmp_path / "other").entries() == []


@pytest.mark.parametrize(
    "answer",
    [
        lambda handler: handler.reply(200, b"{}", Docker_Content_Digest="sha256:" + "1" * 64),
        lambda handler: handler.reply(200, b"x" * (5 << 20)),
        lambda handler: handler.reply(200, b"not JSON"),
        lambda handler: handler.reply(200, b'{"mediaType": "application/vnd.oci.image.index.v1+json"}'),
    ],
)
def test_a_wrong_manifest_is_refused(server: Server, tmp_path: Path, answer: Answer) -> None:
    server.answers.append(times(999, answer, "/manifests/"))
    with pytest.raises(ArtifactError):
        pull_it(server, tmp_path)


def test_a_manifest_of_another_digest_than_requested_is_refused_by_name(server: Server, store: Store) -> None:
    server.answers.append(times(999, lambda handler: handler.reply(200, b"{}"), "/manifests/"))
    location = parse_reference(f"oci://127.0.0.1:{server.server_port}/x@sha256:{'1' * 64}")
    with closing(RegistryImages(location, QUICK)) as images, pytest.raises(ArtifactError, match="not sha256:1111"):
        images.manifest(location)


def test_a_registry_that_stores_something_else_is_an_error(server: Server, store: Store) -> None:
    other = "sha256:" + "1" * 64
    server.answers.append(times(99, lambda handler: handler.reply(404), "HEAD"))
    server.answers.append(times(99, lambda handler: handler.reply(201, Docker_Content_Digest=other), "PUT"))
    with pytest.raises(ArtifactError, match="says it stored 'sha256:1111"):
        push_it(server, store)


@pytest.mark.parametrize("where", ["", "ftp://127.0.0.1/x", "https://127.0.0.1/x", "http://[bad"])
def test_an_upload_is_sent_nowhere_else(server: Server, store: Store, where: str) -> None:
    server.answers.append(times(99, lambda handler: handler.reply(404), "HEAD"))
    server.answers.append(times(99, lambda handler: handler.reply(202, Location=where), "POST"))
    if where:
        with pytest.raises(RemoteError, match="no upload URL"):
            push_it(server, store)
        assert not any(request.startswith("PUT") for request in server.seen)
    else:
        push_it(server, store)


def test_a_blob_is_named_only_after_all_of_it_was_sent(server: Server, store: Store) -> None:
    server.answers.append(times(99, lambda handler: handler.reply(404), "HEAD"))
    push_it(server, store)
    puts = [request for request in server.seen if request.startswith("PUT")]
    assert puts[-1] == "PUT /v2/x/manifests/v1" and all("digest=sha256:" in request for request in puts[:-1])


def test_an_image_manifest_is_requested_uncompressed(server: Server, tmp_path: Path) -> None:
    requested: list[tuple[str | None, str | None]] = []
    names = ("Accept", "Accept-Encoding")
    server.answers.append(lambda handler: bool(requested.append(tuple(map(handler.headers.get, names)))))
    pull_it(server, tmp_path)
    assert requested[0] == (image.MANIFEST_TYPE, "identity")


def test_a_proxy_is_not_requested_this_machine(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert pull_it(server, tmp_path).entries()
