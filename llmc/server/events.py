"""Events that a server process reports to the code that started it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from llmc.server.state import Progress


@dataclass(frozen=True)
class Listening:
    """The socket is bound and responds; `open_to_all`: other hosts can reach it without an API key."""

    url: str
    open_to_all: bool = False


@dataclass(frozen=True)
class Ready:
    """The bundle is open and warm: `seconds` since the process started serving, and `warmed` warm-up steps."""

    model: str
    device: str
    seconds: float
    warmed: int
    compilations: int


@dataclass(frozen=True)
class WarmAside:
    """The warm-up between requests ended: `warmed` buckets in `seconds` of steps.

    The `failed` buckets raised errors, and so will requests that need them.
    """

    warmed: int
    failed: tuple[str, ...]
    seconds: float
    compilations: int


@dataclass(frozen=True)
class Swapped:
    """After `seconds`, new requests run on bundle `digest` of `model` and `draining` ones still on `previous`.

    Not `changed`: that bundle was served already.
    """

    model: str
    digest: str
    previous: str
    seconds: float
    draining: int
    changed: bool = True


@dataclass(frozen=True)
class SwapRefused:
    """A bundle was refused for the reason `code`; the served one stays."""

    message: str
    code: str


@dataclass(frozen=True)
class Retired:
    """The replaced bundle `digest` is closed: its last request ended `seconds` after the swap."""

    digest: str
    seconds: float


@dataclass(frozen=True)
class Draining:
    """Signal `signal` arrived: no new requests; running and waiting ones get `timeout_s` more seconds."""

    signal: str
    running: int
    waiting: int
    timeout_s: float


@dataclass(frozen=True)
class Dead:
    """The engine stopped on an error; the process stays up, unhealthy, until its supervisor replaces it."""

    message: str


@dataclass(frozen=True)
class ReplicaLost:
    """A replica process ended for `reason`; it is restarted after `again_s` seconds."""

    replica: int
    reason: str
    again_s: float


@dataclass(frozen=True)
class ReplicaBack:
    """The restarted replica serves, `seconds` after its start."""

    replica: int
    seconds: float


@dataclass(frozen=True)
class Stopped:
    """The server has stopped: `cancelled` requests did not end in time; stopping took `seconds`."""

    cancelled: int
    seconds: float


Event: TypeAlias = (
    Progress
    | Listening
    | Ready
    | WarmAside
    | Swapped
    | SwapRefused
    | Retired
    | Draining
    | Dead
    | Stopped
    | ReplicaLost
    | ReplicaBack
)
OnEvent = Callable[[Event], None]
"""Called from the event loop, loader and engine threads; must not block."""
