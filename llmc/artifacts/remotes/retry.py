"""Retries: which failures may be temporary, the number of attempts, and the pauses between them.

All retries are here: the protocols' own are turned off, or limited to single pieces of an object.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from llmc.artifacts.log import logger
from llmc.platforms import missing

T = TypeVar("T")

_PASSING_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_PASSING_ERRNO = frozenset({
    errno.EIO, errno.EREMOTEIO, errno.EBUSY, errno.EAGAIN, errno.ETIMEDOUT, errno.EPIPE,
    errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTUNREACH, errno.EHOSTDOWN,
})  # fmt: skip
_TORN_NAMES = frozenset({
    "ChunkedEncodingError",  # requests
    "ClientPayloadError",  # aiohttp, whose cause bears a status of 400 that no server sent
    "IncompleteRead", "IncompleteReadError",  # http.client, urllib3, asyncio
    "ProtocolError",  # urllib3
    "ResponseStreamingError",  # botocore
})  # fmt: skip
"""Errors for a response that broke off."""

_PASSING_NAMES = frozenset({
    "ClientConnectionError",  # aiohttp
    "ConnectionError", "Timeout",  # requests
    "HTTPClientError", "ResponseParserError",  # botocore
    "TransportError",  # httpx
})  # fmt: skip
_LASTING_NAMES = frozenset({"InvalidURL", "SSLError", "ClientConnectorCertificateError"})


class Patience(NamedTuple):
    """The number of attempts, the seconds after which no further attempt starts, and the first pause in seconds.

    Pauses double, up to `longest` seconds, each with up to `first` seconds of jitter.
    """

    attempts: int = 5
    seconds: float = 120.0
    first: float = 0.5
    longest: float = 10.0


PATIENT = Patience()
"""For a transfer that a user requested."""

HURRIED = Patience(attempts=2, seconds=10.0, first=0.25)
"""For an optional lookup."""


def again(call: Callable[[], T], patience: Patience = PATIENT, what: str = "") -> T:
    """Return the result of `call`, retried after temporary failures. Raises what its last attempt raised.

    Raises DeviceError if tenacity is not installed.
    """
    try:
        from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, stop_after_delay
        from tenacity.wait import wait_exponential, wait_random
    except ImportError:
        raise missing("tenacity") from None

    def note(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        logger().info(
            "%s failed (%s), try %d of %d", what, type(error).__name__, state.attempt_number, patience.attempts
        )

    retrying = Retrying(
        stop=stop_after_attempt(patience.attempts) | stop_after_delay(patience.seconds),
        wait=wait_exponential(multiplier=patience.first, max=patience.longest) + wait_random(0, patience.first),
        retry=retry_if_exception(may_pass),
        before_sleep=note,
        reraise=True,
    )
    return retrying(call)


def may_pass(error: BaseException) -> bool:
    """Whether a failure may be temporary: a timeout, a dropped connection, a server that is busy or broken.

    Never for an object that is missing (404) or denied (401, 403). An error's own attribute `passes` wins over its
    status.
    """
    if not isinstance(error, Exception) or isinstance(error, FileNotFoundError | PermissionError):
        return False
    if getattr(error, "passes", False):
        return True
    links = [(link, {base.__name__ for base in type(link).__mro__}) for link in _chain(error)]
    if any(names & _TORN_NAMES for _, names in links):
        return True
    status = http_status(error)
    if status is not None:
        return status in _PASSING_STATUS
    for link, names in links:
        if names & _LASTING_NAMES:
            return False
        if isinstance(link, ConnectionError | TimeoutError) or names & _PASSING_NAMES:
            return True
        if isinstance(link, OSError) and link.errno in _PASSING_ERRNO:
            return True
    return False


def http_status(error: BaseException) -> int | None:
    """Return the HTTP status of an error of any library, or None."""
    for link in _chain(error):
        response = getattr(link, "response", None)
        found: object = None
        if isinstance(response, dict):
            metadata = response.get("ResponseMetadata")
            found = metadata.get("HTTPStatusCode") if isinstance(metadata, dict) else None
        elif response is not None:
            found = getattr(response, "status_code", None)
        for candidate in (found, getattr(link, "status", None), getattr(link, "code", None)):
            if type(candidate) is int and 100 <= candidate <= 599:
                return candidate
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
