"""What each client's program runs: cases by name, one after the other, in the client's own environment.

A line of JSON on standard input names a case, the server and the model. A line of JSON on standard output has what the
case returned, or its traceback.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from pydantic import BaseModel

GREETING = "Say hello."
ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
"""The JSON schema of the tool's arguments."""


class Server(NamedTuple):
    """The server of a case, what its user says, and the case's parameter."""

    url: str
    model: str
    question: str
    parameter: str


class Forecast(BaseModel):
    """A forecast for one city."""

    city: str
    degrees: int


@dataclass
class Said:
    """What a client returned: text, the chunks that it came in, tokens of prompt and answer, calls of the tool."""

    text: str = ""
    chunks: list[str] = field(default_factory=list)
    usage: tuple[int, int] | None = None
    calls: list[tuple[str, int]] = field(default_factory=list)
    value: Any = None

    def get_weather(self, city: str, days: int) -> str:
        """The tool that the model calls.

        Args:
            city: The name of the city.
            days: The number of days.
        """
        self.calls.append((city, days))
        return f"{days * 10 + 1} degrees in {city}"


Case = Callable[[Server], Said]


def run(cases: dict[str, Case]) -> None:
    """Answer requests until standard input ends. What clients print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        requested = json.loads(line)
        try:
            said = cases[requested["case"]](Server(*requested["server"]))
            answer = {"said": asdict(said)}
        except Exception:  # noqa: BLE001 - the test shows it
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
