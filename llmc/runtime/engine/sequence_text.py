"""The text of one sequence as its tokens arrive: whole characters, cut at stop strings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.runtime.text.stops import StopChecker, StopStrings
from llmc.runtime.text.tokenizer import StreamDetokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmc.runtime.engine.sampling.params import SamplingParams
    from llmc.runtime.text.tokenizer import Tokenizer


class SequenceText:
    """Text that is certain after each token; joined it is what the sequence adds to its prompt's text. Without a
    tokenizer there is none.

    The token that ends a sequence is no text, except with include_stop_str_in_output. Stop strings count from
    min_tokens on; `stops` finds those of `params`, where that was made already.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, params: SamplingParams, prompt: Sequence[int] = (),
        stops: StopStrings | None = None,
    ) -> None:  # fmt: skip
        self._detokenizer: StreamDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = StreamDetokenizer(tokenizer, params.skip_special_tokens, prompt)
        self._stop = StopChecker(params.stop_strings if stops is None else stops)
        self._include = params.include_stop_str_in_output
        self._unchecked = params.min_tokens

    @property
    def stopped_at(self) -> str | None:
        """The stop string that ended the text."""
        return self._stop.matched

    def feed(self, token_id: int, ends: bool, last: bool) -> str:
        """Take one token: `ends`, an end or stop token; `last`, the last one, for whatever reason."""
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
        """What was held back, where no token comes any more."""
        if self._detokenizer is None:
            return ""
        text = self._stop.feed(self._detokenizer.flush())
        return text if self._stop.matched is not None else text + self._stop.flush()
