"""Logging in to a registry: tokens, accounts, and whom they are told."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from llmc.artifacts.oci.registry import Login
from llmc.artifacts.remotes.base import RemoteError
from llmc.artifacts.store.store import Store
from tests.artifacts.oci.server import Handler, Server, pull_it, push_it, times


def asks_for_token(server: Server, valid: int = 99) -> list[str]:
    """Make a server hand out tokens, each good for `valid` requests; returns what was told to the token service."""
    reported: list[str] = []
    left = {"token": 0}

    def guard(handler: Handler) -> bool:
        if handler.path.startswith("/token"):
            reported.append(handler.headers.get("Authorization", ""))
            left["token"] = valid
            return handler.reply(200, json.dumps({"token": f"t{len(reported)}"}).encode())
        if handler.headers.get("Authorization") == f"Bearer t{len(reported)}" and left["token"] > 0:
            left["token"] -= 1
            return False
        realm = f"http://127.0.0.1:{server.server_port}/token"
        return handler.reply(401, WWW_Authenticate=f'Bearer realm="{realm}",service="here",scope="repository:x:pull"')

    server.answers.append(guard)
    return reported


def log_in(server: Server, home: Path) -> str:
    """Leave what `docker login` leaves; returns the account."""
    secret = base64.b64encode(b"me:s3cret").decode()
    (home / ".docker").mkdir()
    auths = {"auths": {f"127.0.0.1:{server.server_port}": {"auth": secret}}}
    (home / ".docker" / "config.json").write_text(json.dumps(auths))
    return secret


def test_an_anonymous_token_is_requested_once(server: Server, tmp_path: Path) -> None:
    reported = asks_for_token(server)
    assert pull_it(server, tmp_path).entries()
    assert reported == [""]


def test_a_token_is_requested_with_the_account_and_again_when_it_expires(
    server: Server, store: Store, home: Path
) -> None:
    secret = log_in(server, home)
    reported = asks_for_token(server, valid=3)
    server.answers.append(times(99, lambda handler: handler.reply(404), "HEAD"))
    push_it(server, store)
    assert set(reported) == {f"Basic {secret}"} and len(reported) > 1


def test_a_registry_that_takes_no_token_is_refused_at_last(server: Server, tmp_path: Path) -> None:
    asks_for_token(server, valid=0)
    with pytest.raises(RemoteError, match="access denied"):
        pull_it(server, tmp_path)
    assert len(server.seen) < 10


@pytest.mark.parametrize("realm", ["http://elsewhere.invalid/token", "ftp://127.0.0.1/token", "nonsense"])
def test_no_account_is_reported_to_a_token_service_without_https(server: Server, tmp_path: Path, realm: str) -> None:
    challenge = f'Bearer realm="{realm}",service="here"'
    server.answers.append(lambda handler: handler.reply(401, WWW_Authenticate=challenge))
    with pytest.raises(RemoteError, match="not reached by HTTPS"):
        pull_it(server, tmp_path)


@pytest.mark.parametrize(
    ("realm", "hosts", "reported"),
    [
        ("https://attacker.invalid/token", "", False),
        ("https://127.0.0.1.attacker.invalid/token", "", False),
        ("https://me:x@attacker.invalid/token", "127.0.0.1", False),
        ("https://auth.invalid:8443/token", "other.invalid, AUTH.invalid", True),
    ],
)
def test_an_account_goes_to_the_registry_s_own_token_service_or_one_that_is_named(
    server: Server, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, realm: str, hosts: str, reported: bool
) -> None:
    """A registry could name anybody's: it would have the password of the account there."""
    log_in(server, home)
    monkeypatch.setenv("LLMC_TOKEN_HOSTS", hosts)
    challenge = f'Bearer realm="{realm}",service="here"'
    server.answers.append(lambda handler: handler.reply(401, WWW_Authenticate=challenge))
    with pytest.raises(RemoteError) as raised:
        pull_it(server, tmp_path)
    refused = "names a token service on another host" in str(raised.value)
    assert refused is not reported, "a service that is asked is not there: these names do not resolve"
    if refused:
        assert f"LLMC_TOKEN_HOSTS={urlsplit(realm).hostname}" in str(raised.value)


@pytest.mark.parametrize(
    ("host", "realm", "own"),
    [
        ("ghcr.io", "ghcr.io", True), ("registry.gitlab.com", "gitlab.com", True),
        ("registry-1.docker.io", "auth.docker.io", True), ("docker.io", "auth.docker.io", True),
        ("evil.docker.io.example", "auth.docker.io", False), ("registry.example.com", "auth.example.com", False),
        ("registry.example.com", "com", False), ("registry.example.com", "registry.example.com:444", False),
        ("gitlab.com", "registry.gitlab.com", False), ("localhost:5000", "127.0.0.1:5001", True),
    ],
)  # fmt: skip
def test_which_token_services_are_a_registry_s_own(host: str, realm: str, own: bool) -> None:
    login = Login(host, None, plain_http=host.startswith("localhost"))
    scheme = "http" if host.startswith("localhost") else "https"
    challenge = f'Bearer realm="{scheme}://{realm}/token"'
    login._require_own(challenge, has_account=False)
    if own:
        login._require_own(challenge, has_account=True)
        return
    with pytest.raises(RemoteError, match="names a token service on another host"):
        login._require_own(challenge, has_account=True)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Server]:
    """Another server, by another name, where registries keep their blobs."""
    server = Server(tmp_path / "images")
    yield server
    server.shutdown()
    server.server_close()


def noted(server: Server) -> list[str | None]:
    """The header Authorization of all requests from now on."""
    headers: list[str | None] = []
    server.answers.append(lambda handler: bool(headers.append(handler.headers.get("Authorization"))))
    return headers


def test_a_token_does_not_go_where_blobs_are_fetched(server: Server, elsewhere: Server, tmp_path: Path) -> None:
    headers = noted(elsewhere)
    asks_for_token(server)

    def redirect(handler: Handler) -> bool:
        return handler.reply(307, Location=f"http://localhost:{elsewhere.server_port}{handler.path}")

    server.answers.append(times(99, redirect, "/blobs/"))
    assert pull_it(server, tmp_path).entries()
    assert headers and set(headers) == {None}


def test_a_token_does_not_go_where_blobs_are_sent(server: Server, elsewhere: Server, store: Store) -> None:
    headers = noted(elsewhere)
    asks_for_token(server)
    where = f"http://localhost:{elsewhere.server_port}/upload"
    server.answers.append(times(99, lambda handler: handler.reply(404), "HEAD"))
    server.answers.append(times(99, lambda handler: handler.reply(202, Location=where), "POST"))
    push_it(server, store)
    assert headers and set(headers) == {None}
