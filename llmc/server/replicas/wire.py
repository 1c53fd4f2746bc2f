"""What a replica tells its supervisor, a line each.

    line = "-" | {"event": name, field: value, …} | {"error": text, "code": exit code}

"-": a connection that was handed over has ended. The supervisor sends the connections, each with a byte.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TypeAlias

from llmc.errors import LlmcError
from llmc.server import events
from llmc.server.events import Event

HANDED = b"+"
ENDED = b"-\n"
_EVENTS = {
    kind.__name__: kind
    for kind in (
        events.Ready, events.WarmAside, events.Swapped, events.SwapRefused, events.Retired, events.Draining,
        events.Dead, events.Stopped,
    )
}  # fmt: skip
"""Those that a supervisor hears of: where it listens, it knows, and how far a replica has come, /ready tells."""


@dataclass(frozen=True)
class Failure:
    """What a replica ended with, and the exit code for it."""

    message: str
    code: int

    @property
    def error(self) -> LlmcError:
        """The error for the command line, with that exit code."""
        raised = LlmcError(self.message)
        raised.exit_code = self.code
        return raised


Told: TypeAlias = Event | Failure | None


def line_of(told: Event | Failure) -> bytes:
    """The line; empty for events that the supervisor has no use for."""
    if isinstance(told, Failure):
        return json.dumps({"error": told.message, "code": told.code}).encode() + b"\n"
    name = type(told).__name__
    return json.dumps({"event": name, **asdict(told)}).encode() + b"\n" if name in _EVENTS else b""


def told_by(line: bytes) -> Told:
    """What a line says; None: a connection has ended."""
    if line + b"\n" == ENDED:
        return None
    fields = json.loads(line)
    if "error" in fields:
        return Failure(fields["error"], fields["code"])
    return _EVENTS[fields.pop("event")](**fields)
