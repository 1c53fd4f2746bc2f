"""Events of a server process, reported to the code that started it: one dataclass for each event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from llmc.server.state import Progress


@dataclass(frozen=True)
class Listening:
    """The socket is bound and answers; `open_to_all`: others than this host reach it, and no API key is asked for."""

    url: str
    open_to_all: bool = False


@dataclass(frozen=True)
class Ready:
    """The bundle is open and warm. `seconds` since the process began to serve, `warmed` steps run for it."""

    model: str
    device: str
    seconds: float
    warmed: int
    compilations: int


@dataclass(frozen=True)
class WarmAside:
    """Buckets that were left to run between requests have run: `warmed` of them, in `seconds` of steps; the others
    `failed`, and requests that need them will too."""

    warmed: int
    failed: tuple[str, ...]
    seconds: float
    compilations: int


@dataclass(frozen=True)
class Swapped:
    """New requests run on the bundle `digest` of `model` in place of `previous`, on which `draining` requests still
    run; `seconds` since it was asked for. Not `changed`: that bundle was served already."""

    model: str
    digest: str
    previous: str
    seconds: float
    draining: int
    changed: bool = True


@dataclass(frozen=True)
class SwapRefused:
    """A bundle was not taken, by the reason `code`; what was served is served."""

    message: str
    code: str


@dataclass(frozen=True)
class Retired:
    """The last request on the bundle `digest` ended `seconds` after another one took its place; it is closed."""

    digest: str
    seconds: float


@dataclass(frozen=True)
class Draining:
    """Signal `signal` came: no new requests; those that run or wait may take `timeout_s` seconds more."""

    signal: str
    running: int
    waiting: int
    timeout_s: float


@dataclass(frozen=True)
class Dead:
    """The engine stopped on an error; the process stays up, unhealthy, for its keeper to replace."""

    message: str


@dataclass(frozen=True)
class ReplicaLost:
    """One of several server processes ended, for `reason`; another one starts in its place after `again_s` seconds."""

    replica: int
    reason: str
    again_s: float


@dataclass(frozen=True)
class ReplicaBack:
    """The process in its place serves, `seconds` after it was started."""

    replica: int
    seconds: float


@dataclass(frozen=True)
class Stopped:
    """Nothing is served any more; `cancelled` requests did not end in time, `seconds` were spent on stopping."""

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
Report = Callable[[Event], None]
"""Called from the loop's thread, the loader's and the engine's; must return at once."""
