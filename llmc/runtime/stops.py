"""Cuts a stream of text at stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.errors import InputError


class StopChecker:
    """Cuts a stream of text before the first stop string.

    The first is the one that is complete earliest (of two complete at once, the longer), so that the result
    does not depend on how the text was divided. Text that may be the beginning of a stop string is held back.
    Time per character does not depend on the length of the stop strings.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if any(not stop for stop in stops):
            raise InputError("a stop string must not be empty")
        self.matched: str | None = None
        """The stop string that ended the text."""
        self._matchers = [_Matcher(stop) for stop in stops]
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that can be shown; empty once a stop string was met."""
        if self.matched is not None or not text:
            return ""
        if not self._matchers:
            return text
        pending = self._held + text
        for index in range(len(self._held), len(pending)):
            complete = [matcher.stop for matcher in self._matchers if matcher.step(pending[index])]
            if complete:
                self.matched = max(complete, key=len)
                self._held = ""
                return pending[: index + 1 - len(self.matched)]
        held = max(matcher.length for matcher in self._matchers)
        self._held = pending[len(pending) - held :]
        return pending[: len(pending) - held]

    def flush(self) -> str:
        """What was held back and turned out not to be a stop string; call once, at the end."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """Knuth, Morris and Pratt's automaton: the text so far ends with `length` characters of `stop`."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._border = [0] * len(stop)
        length = 0
        for index in range(1, len(stop)):
            while length and stop[index] != stop[length]:
                length = self._border[length - 1]
            length += stop[index] == stop[length]
            self._border[index] = length

    def step(self, character: str) -> bool:
        """Takes one character; True when the stop string is complete."""
        while self.length and character != self.stop[self.length]:
            self.length = self._border[self.length - 1]
        self.length += character == self.stop[self.length]
        return self.length == len(self.stop)
