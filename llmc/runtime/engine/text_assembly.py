"""Assembles one sequence's text as its tokens arrive: whole characters, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmc.errors import InputError
from llmc.runtime.text.tokenizer import StreamDetokenizer

if TYPE_CHECKING:
    from llmc.runtime.engine.sampling.params import SamplingParams
    from llmc.runtime.text.tokenizer import Tokenizer


class StopStrings:
    """Aho-Corasick automaton of stop strings, built once and shared by all texts.

    A state is the longest prefix of a stop string that the text ends with; `depths` has its length, `ends` the longest
    stop string complete in it. State 0 is the start. Raises InputError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if any(not stop for stop in stops):
            raise InputError("a stop string must not be empty")
        self._next: list[dict[str, int]] = [{}]
        self._border = [0]
        self.depths = [0]
        self.ends: list[str | None] = [None]
        for stop in stops:
            self.ends[self._spell(stop)] = stop
        self._link()

    def _spell(self, stop: str) -> int:
        state = 0
        for depth, character in enumerate(stop, 1):
            state = self._next[state].setdefault(character, len(self._next))
            if state == len(self._next):
                self._next.append({})
                self._border.append(0)
                self.depths.append(depth)
                self.ends.append(None)
        return state

    def _link(self) -> None:
        """Link each state to that of its longest proper suffix, breadth first, because shorter ones must come first."""
        order = list(self._next[0].values())
        for state in order:
            for character, after in self._next[state].items():
                border = self.after(self._border[state], character)
                self._border[after] = border
                self.ends[after] = self.ends[after] or self.ends[border]
                order.append(after)

    def __bool__(self) -> bool:
        return len(self._next) > 1

    def after(self, state: int, character: str) -> int:
        """The state after `character`."""
        while character not in self._next[state]:
            if not state:
                return 0
            state = self._border[state]
        return self._next[state][character]


class StopChecker:
    """Cuts a stream of text before the first stop string.

    The first is the one that completes earliest (the longer of two), so the result does not depend on how the text was
    split. Text that may begin a stop string is held back. Time per character does not depend on the number or lengths
    of the stop strings.
    """

    def __init__(self, stops: StopStrings | Sequence[str] = ()) -> None:
        self._stops = stops if isinstance(stops, StopStrings) else StopStrings(stops)
        self.matched: str | None = None
        """The stop string that ended the text."""
        self._state = 0
        self._held = ""

    def feed(self, text: str) -> str:
        """Add text and return what can be shown; empty after a stop string was met."""
        if self.matched is not None or not text:
            return ""
        stops = self._stops
        if not stops:
            return text
        pending, state = self._held + text, self._state
        for index in range(len(self._held), len(pending)):
            state = stops.after(state, pending[index])
            if stops.ends[state] is not None:
                self.matched = stops.ends[state]
                self._held = ""
                return pending[: index + 1 - len(self.matched or "")]
        self._state = state
        shown = len(pending) - stops.depths[state]
        self._held = pending[shown:]
        return pending[:shown]

    def flush(self) -> str:
        """The text held back that is not a stop string; call once, at the end."""
        held, self._held = self._held, ""
        return held


class SequenceText:
    """Text that is final after each token; concatenated, it is the sequence's output text. Empty without a tokenizer.

    The token that ends a sequence adds no text, except with include_stop_str_in_output. Stop strings count from
    min_tokens on. `stops` is the automaton for `params`, if already built.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, params: SamplingParams, prompt: Sequence[int] = (),
        stops: StopStrings | None = None,
    ) -> None:  # fmt: skip
        self._detokenizer: StreamDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            kept = params.kept_special_ids or ()
            self._detokenizer = StreamDetokenizer(tokenizer, params.skip_special_tokens, prompt, kept)
        self._stop = StopChecker(params.stop_strings if stops is None else stops)
        self._include = params.include_stop_str_in_output
        self._unchecked = params.min_tokens

    @property
    def stopped_at(self) -> str | None:
        """The stop string that ended the text."""
        return self._stop.matched

    def feed(self, token_id: int, ends: bool, last: bool) -> str:
        """Add a token and return the final text. `ends`: an end or stop token; `last`: the last one."""
        if self._detokenizer is None:
            return ""
        self._unchecked -= 1
        text = "" if ends and not self._include else self._detokenizer.feed(token_id)
        if self._unchecked < 0:
            text = self._stop.feed(text)
        if last and self._stop.matched is None:
            text += self.flush()
        if self._stop.matched is not None and self._include:
            text += self._stop.matched
        return text

    def flush(self) -> str:
        """The text held back, if no further token comes."""
        if self._detokenizer is None:
            return ""
        text = self._stop.feed(self._detokenizer.flush())
        return text if self._stop.matched is not None else text + self._stop.flush()
