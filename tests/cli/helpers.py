"""What a command did, and what a person or a script would see of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple


class Ran(NamedTuple):
    """Exit code, standard output, standard error."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON document on standard output."""
        assert self.code == 0, self
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        """A JSON document a line."""
        assert self.code == 0, self
        return [json.loads(line) for line in self.out.splitlines()]

    def failed(self, code: int) -> str:
        """What a failure says: one line on standard error, and nothing else on either stream."""
        assert self.code == code, self
        assert self.out == "", self.out
        assert self.err.startswith("llmc: error: ") and self.err.endswith("\n") and self.err.count("\n") == 1, self.err
        return self.err.removeprefix("llmc: error: ").rstrip("\n")


Llmc = Callable[..., Ran]
