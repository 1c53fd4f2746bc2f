"""Conversion of text to token ids and back, whole or as a stream.

`Tokenizer` wraps a Hugging Face tokenizer.json; `StreamDetokenizer` turns ids into text as they arrive. A stream's
texts concatenate to exactly `Tokenizer.decode` of all its ids.
"""

from __future__ import annotations

import codecs
import json
import re
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from llmc.errors import ArtifactError, InputError
from llmc.runtime.text.bounds import Bounds, bounds_of
from llmc.runtime.text.token_width import TokenWidth, byte_alphabet, token_width

if TYPE_CHECKING:
    from llmc.runtime.confined.pool import ChildPool
    from llmc.runtime.text.vocabulary import Vocabulary

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"
_MOST_CUTS = 16
"""The number of texts encoded by vocabulary cuts; together they take as long as reading all of it."""
_LONG = 2048
"""From this many characters or ids on, tokenizers gets a batch of one, so that other threads can run."""
_BEFORE = 4
"""Prompt tokens, out of its last _FARTHEST_BEFORE, that precede an output when its text is decoded."""
_FARTHEST_BEFORE = 256
_MAX_HELD = 16
"""Tokens held back for a character that may still be completed; one has at most 4 bytes."""


class Tokenizer:
    """A tokenizer from the bytes of a tokenizer.json. Thread-safe.

    `eos_token_ids` are the end tokens, in the order given. Truncation and padding of the file are disabled, so a prompt
    is never shortened silently. Raises ArtifactError for invalid bytes.

    With a `vocabulary` from the same file, `data` is called only when the whole file is needed: for a long text, more
    than a few texts, or decoding. A server calls `load` to avoid that delay later.
    """

    def __init__(
        self, data: bytes | Callable[[], bytes], eos_token_ids: Iterable[int] = (), vocabulary: Vocabulary | None = None
    ) -> None:
        self.eos_token_ids = tuple(eos_token_ids)
        self._data = data
        self._vocabulary = vocabulary
        self._loading = threading.Lock()
        self._whole: Any = None
        self._bounds: Bounds | None = None
        self._confined: ChildPool | None = None
        self._cuts = 0
        self._pieces: dict[int, bytes] = {}
        if vocabulary is None:
            self.load()

    def load(self) -> None:
        """Read the whole file now, if not yet done. Raises ArtifactError."""
        with self._loading:
            if self._whole is None:
                whole = _backend(self._file())
                self._bounds = bounds_of(whole)
                self._whole = whole

    def _file(self) -> bytes:
        return self._data() if callable(self._data) else self._data

    @property
    def _backend(self) -> Any:
        if self._whole is None:
            self.load()
        return self._whole

    @cached_property
    def _decoder(self) -> dict[str, Any]:
        if self._vocabulary is not None:
            return dict(self._vocabulary.skeleton["decoder"])
        decoder = self._backend.decoder
        return {} if decoder is None else dict(json.loads(decoder.__getstate__()))

    @property
    def bounds(self) -> Bounds:
        """Bounds on the cost of encoding, from the file if it was read, otherwise from the vocabulary index's steps.

        Raises ArtifactError for a rejected tokenizer.
        """
        return self._index_bounds if self._bounds is None else self._bounds

    @cached_property
    def _index_bounds(self) -> Bounds:
        assert self._vocabulary is not None  # otherwise the file was read at once
        return bounds_of(self._vocabulary.steps)

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, including added ones; ids may have gaps."""
        return int(self._backend.get_vocab_size())

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` omits when it skips special tokens."""
        if self._vocabulary is not None:
            return frozenset(token["id"] for token in self._vocabulary.skeleton["added_tokens"] if token.get("special"))
        added = self._backend.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in it are recognised.

        `add_special_tokens` adds what the model expects around a text, such as its bos token. Pass False for text from
        a chat template, which already contains them. Raises InputError for non-Unicode text.
        """
        return self.encode_last(text, None, add_special_tokens)[0]

    def encode_last(
        self, text: str, most: int | None, add_special_tokens: bool = True, shortened: bool = True
    ) -> tuple[list[int], int]:  # fmt: skip
        """The last `most` ids of `encode` (None: all), and the total number of ids.

        A longer text that must not be `shortened` gets no ids, because listing millions of them holds the interpreter.
        Letting tokenizers truncate instead would take three times as long, because it copies the rest into pieces of
        `most`.
        """
        _require_unicode(text)
        cut = self._cut(text) if self.bounds.fits(len(text)) else None
        if cut is None:
            self.load()  # from now on the bounds are the file's, not its index's
            if not self.bounds.fits(len(text)):
                how = {"most": most, "add_special_tokens": add_special_tokens, "shortened": shortened}
                return self._encoded_apart(text, how)
        return _encoded(cut or self._whole, text, most, add_special_tokens, shortened)

    def encode_here(
        self, text: str, most: int | None, add_special_tokens: bool = True, shortened: bool = True
    ) -> tuple[list[int], int]:  # fmt: skip
        """Encode in this process without checking the cost, for a process with its own limits."""
        _require_unicode(text)
        return _encoded(self._backend, text, most, add_special_tokens, shortened)

    def _encoded_apart(self, text: str, how: dict[str, Any]) -> tuple[list[int], int]:
        """Encode in a child process with limits, which stays for the next text. Raises InputError beyond its limits."""
        from llmc.runtime.confined.pool import JobError, LimitError
        from llmc.runtime.text.encoding_pool import encoding_pool, not_encoded

        with self._loading:
            if self._confined is None:
                self._confined = encoding_pool(self._file())
        try:
            ((ids, count),) = self._confined.run({"texts": [text], "how": how}).value
        except (LimitError, JobError) as error:
            raise not_encoded(error) from None
        return ids, count

    def _cut(self, text: str) -> Any:
        """A tokenizer reduced to this text, while that costs less than reading the whole file; otherwise None."""
        if self._whole is not None or self._vocabulary is None or self._cuts >= _MOST_CUTS:
            return None
        self._cuts += 1
        cut = self._vocabulary.cut(text)
        return None if cut is None else _backend(cut.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode ids to text; unknown ids are skipped. Raises InputError for a negative id."""
        ids = list(ids)
        try:
            if len(ids) < _LONG:
                return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))
            return str(self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0])
        except (OverflowError, TypeError) as error:
            raise InputError(f"token ids are integers from 0: {error}") from error

    def token_to_id(self, token: str) -> int | None:
        """Id of a token given its text."""
        index: int | None = self._backend.token_to_id(token)
        return index

    def id_to_token(self, index: int) -> str | None:
        """A token's text as the vocabulary writes it, or None."""
        if self._vocabulary is not None and index >= 0:
            return self._vocabulary.token(index)
        try:
            token: str | None = self._backend.id_to_token(index)
        except OverflowError as error:
            raise InputError(f"token ids are integers from 0: {index}") from error
        return token

    @cached_property
    def width(self) -> TokenWidth | None:
        """The largest text length of a token; None if unknown."""
        return token_width(self._backend)

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether decoding only concatenates the tokens' bytes (GPT-2's alphabet)."""
        steps = self._decoder.get("decoders", [self._decoder])
        return [step.get("type") for step in steps] == ["ByteLevel"]

    def piece(self, index: int) -> bytes:
        """Bytes that a token adds to a byte-level text; empty for an id without a token."""
        known = self._pieces.get(index)
        if known is None:
            token = self.id_to_token(index) or ""
            values = [_BYTE_OF.get(character) for character in token]
            known = token.encode() if None in values else bytes(value for value in values if value is not None)
            self._pieces[index] = known
        return known


def _require_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"the text holds a lone surrogate at character {error.start}: not Unicode") from error


def _encoded(
    backend: Any, text: str, most: int | None, add_special_tokens: bool, shortened: bool
) -> tuple[list[int], int]:  # fmt: skip
    if len(text) < _LONG:
        encoded = backend.encode(text, add_special_tokens=add_special_tokens)
    else:
        (encoded,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    count = len(encoded)
    if most is None or count <= most:
        return list(encoded.ids), count
    return encoded.ids[-most:] if shortened else [], count


def _backend(data: bytes) -> Any:
    from tokenizers import Tokenizer as Backend

    try:
        backend: Any = Backend.from_buffer(data)
    except Exception as error:  # tokenizers raises bare Exception for a file that it cannot parse
        raise ArtifactError(
            f"tokenizer.json is damaged or of a newer format ({error}); fetch it, or compile the bundle, again"
        ) from error
    backend.no_truncation()
    backend.no_padding()
    return backend


_BYTE_OF = byte_alphabet()


class StreamDetokenizer:
    """Decodes one sequence token by token.

    `feed` returns the text that is final after each id, `flush` the rest. Joined, they equal `tokenizer.decode(all ids,
    skip_special_tokens)`, or with `prompt`, what the ids add to its text: many decoders drop a space before the first
    word of a text, and the output's first word is not that. A character spread over several tokens is returned whole
    with its last byte. Special tokens of `kept` are not skipped. Each
    `feed` takes constant time (about 1 µs for byte-level vocabularies, 3 µs for others).

    Byte-level vocabularies decode bytes incrementally. Others decode a window of the last tokens twice, with and
    without the new one, because a token's text may depend on its neighbours. A run of byte tokens (`<0x..>`) is then
    returned at its end, because one bad byte changes the text of the whole run.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt: Sequence[int] = (),
        kept: Collection[int] = (),
    ) -> None:  # fmt: skip
        self._skipped = tokenizer.special_ids - frozenset(kept) if skip_special_tokens else frozenset()
        self._text: _ByteText | _WindowText
        if tokenizer.is_byte_level:
            self._text = _ByteText(tokenizer)
        else:
            self._text = _WindowText(tokenizer, _last_words(tokenizer, prompt, self._skipped))

    def feed(self, token_id: int) -> str:
        """Add an id and return the text that became final. Raises InputError for a negative id."""
        return "" if token_id in self._skipped else self._text.feed(token_id)

    def flush(self) -> str:
        """The text held back; call once, at the end."""
        return self._text.flush()


def _last_words(tokenizer: Tokenizer, prompt: Sequence[int], skipped: frozenset[int]) -> list[int]:
    """The last prompt ids that keep what follows from being decoded as the beginning of a text.

    Contains no byte token, which might join a run of bytes after it.
    """
    found: list[int] = []
    for token_id in reversed(prompt[-_FARTHEST_BEFORE:]):
        token = None if token_id in skipped else tokenizer.id_to_token(token_id)
        if token is not None and not _BYTE_TOKEN.fullmatch(token):
            found.append(token_id)
            if len(found) == _BEFORE:
                break
    return found[::-1]


class _ByteText:
    """Tokens are bytes and the text is their UTF-8 reading; bad bytes become U+FFFD, as in tokenizers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._piece = tokenizer.piece
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        return self._utf8.decode(self._piece(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowText:
    """`_ids` is the window: reported tokens (text `_reported`) as left context, then the held ones.

    `before` precedes the first token.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(before)
        self._context = len(self._ids)
        self._reported: str | None = None
        """The text of the first `_context` ids; None until needed."""

    def feed(self, token_id: int) -> str:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return ""
        self._ids.append(token_id)
        if _BYTE_TOKEN.fullmatch(token):
            return ""
        text = self._decode(self._ids)
        held = len(self._ids) - self._context
        if text.endswith(_REPLACEMENT) and _REPLACEMENT not in token and held < _MAX_HELD:
            return ""
        return self._report(text)

    def flush(self) -> str:
        return self._report(self._decode(self._ids)) if len(self._ids) > self._context else ""

    def _report(self, text: str) -> str:
        if self._reported is None:
            self._reported = self._decode(self._ids[: self._context])
        new = text[len(self._reported) :]
        self._ids = self._ids[self._context :]
        self._context = len(self._ids)
        self._reported = self._decode(self._ids)
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
