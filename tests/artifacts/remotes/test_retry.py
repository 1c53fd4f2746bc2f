"""What is tried again, how often, and what never is."""

from __future__ import annotations

import errno
import http.client
import logging
import re

import pytest

from llmc.artifacts.remotes.retry import Patience, again, http_status, may_pass
from llmc.errors import DeviceError
from llmc.platforms import install_line
from tests.artifacts.remotes.helpers import BRIEF


class ClientError(Exception):
    """As botocore's."""

    def __init__(self, status: int) -> None:
        super().__init__("refused")
        self.response = {"Error": {"Code": "X"}, "ResponseMetadata": {"HTTPStatusCode": status}}


class HTTPError(OSError):
    """As requests' and huggingface_hub's."""

    def __init__(self, status: int) -> None:
        super().__init__("refused")
        self.response = type("Response", (), {"status_code": status})()


class ClientResponseError(Exception):
    """As aiohttp's."""

    def __init__(self, status: int) -> None:
        super().__init__("refused")
        self.status = status


class HTTPClientError(Exception):
    """As botocore's base of what fails on the way."""


class EndpointConnectionError(HTTPClientError):
    pass


class ClientPayloadError(Exception):
    """As aiohttp's, for an answer that broke off."""


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("kind", [ClientError, HTTPError, ClientResponseError])
@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_a_busy_or_broken_server_may_pass(kind: type[Exception], status: int) -> None:
    assert http_status(kind(status)) == status
    assert may_pass(kind(status))
    assert may_pass(caused(OSError(errno.EINVAL, "translated"), kind(status)))


@pytest.mark.parametrize("kind", [ClientError, HTTPError, ClientResponseError])
@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 412, 416, 501])
def test_a_refusal_does_not(kind: type[Exception], status: int) -> None:
    assert not may_pass(kind(status))
    assert not may_pass(caused(ConnectionError("wrapped"), kind(status)))


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(),
        BrokenPipeError(),
        TimeoutError(),
        OSError(errno.EIO, "x"),
        OSError(errno.EBUSY, "SlowDown"),
        OSError(errno.ENETUNREACH, "x"),
        http.client.IncompleteRead(b""),
        EndpointConnectionError(),
        caused(RuntimeError("wrapped"), ConnectionAbortedError()),
        caused(ClientPayloadError(), ClientResponseError(400)),
        caused(OSError(errno.EINVAL, "translated"), http.client.IncompleteRead(b"")),
    ],
)
def test_a_broken_connection_may_pass(error: Exception) -> None:
    assert may_pass(error)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(),
        PermissionError(),
        ValueError(),
        OSError(errno.ENOSPC, "x"),
        OSError(errno.EINVAL, "x"),
        KeyboardInterrupt(),
        caused(PermissionError(), ConnectionError()),
    ],
)
def test_the_rest_does_not(error: BaseException) -> None:
    assert not may_pass(error)


def test_a_circle_of_causes_ends() -> None:
    one, other = RuntimeError(), RuntimeError()
    one.__cause__, other.__cause__ = other, one
    assert not may_pass(one)


class Flaky:
    def __init__(self, failures: int, error: Exception) -> None:
        self.calls = 0
        self._failures = failures
        self._error = error

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self._failures:
            raise self._error
        return "done"


def test_what_passes_is_tried_again_and_said(caplog: pytest.LogCaptureFixture) -> None:
    flaky = Flaky(3, ConnectionResetError("secret=1"))
    with caplog.at_level(logging.INFO, "llmc.artifacts"):
        assert again(flaky, BRIEF, "s3://b: name") == "done"
    assert flaky.calls == 4
    assert caplog.messages[0] == "s3://b: name failed (ConnectionResetError), try 1 of 4"
    assert "secret" not in caplog.text


def test_attempts_are_bounded() -> None:
    flaky = Flaky(99, ConnectionResetError())
    with pytest.raises(ConnectionResetError):
        again(flaky, BRIEF)
    assert flaky.calls == BRIEF.attempts


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("tenacity.nap.time.sleep", pauses.append)
    monkeypatch.setattr("tenacity.time.monotonic", lambda: sum(pauses))
    flaky = Flaky(99, ConnectionResetError())
    with pytest.raises(ConnectionResetError):
        again(flaky, Patience(attempts=1000, seconds=50, first=10, longest=20))
    assert flaky.calls == 4, "after pauses of at least 10, 20 and 20 seconds"


def test_a_refusal_is_not_tried_again() -> None:
    flaky = Flaky(99, PermissionError())
    with pytest.raises(PermissionError):
        again(flaky, BRIEF)
    assert flaky.calls == 1


def test_pauses_double_up_to_a_limit_with_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("tenacity.nap.time.sleep", pauses.append)
    with pytest.raises(ConnectionResetError):
        again(Flaky(99, ConnectionResetError()), Patience(attempts=7, seconds=1e9, first=1, longest=8))
    assert len(pauses) == 6
    for pause, least in zip(pauses, (1, 2, 4, 8, 8, 8), strict=True):
        assert least <= pause <= least + 1


def test_without_tenacity_the_way_to_get_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tenacity", None)
    with pytest.raises(DeviceError, match=rf"tenacity is not installed; .*{re.escape(install_line('remote'))}"):
        again(lambda: 1)
