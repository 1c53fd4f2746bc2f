"""Log probabilities in OpenAI's two formats."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmc.runtime.engine.sampling.batch import TokenLogprobs
    from llmc.runtime.text.tokenizer import Tokenizer

LEAST = -9999.0
"""Replaces minus infinity, which JSON lacks."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Return the bytes that a token adds to a text; they may be part of a character."""
    token = tokenizer.id_to_token(token_id) or ""
    if tokenizer.is_byte_level:
        return tokenizer.piece(token_id)
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    return token_bytes(tokenizer, token_id).decode("utf-8", "replace")


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[TokenLogprobs], as_ids: bool = False) -> dict[str, Any]:
    """Return `choices[].logprobs` of a chat. `as_ids`: a token is shown as token_id:5, which no other one is."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(tokenizer, token_id)
        shown = f"token_id:{token_id}" if as_ids else raw.decode("utf-8", "replace")
        return {"token": shown, "logprob": max(logprob, LEAST), "bytes": list(raw)}

    content = [
        {**entry(t.token_id, t.logprob), "top_logprobs": [entry(*pair) for pair in t.top]} for t in tokens
    ]  # fmt: skip
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs], offset: int = 0, as_ids: bool = False
) -> dict[str, Any]:
    """Return `choices[].logprobs` of a completion; `offset`: characters before the first token's text.

    `as_ids`: a token is shown as token_id:5, which no other one is.
    """
    texts, offsets, tops = [], [], []

    def shown(token_id: int) -> str:
        return f"token_id:{token_id}" if as_ids else _text(tokenizer, token_id)

    for t in tokens:
        texts.append(shown(t.token_id))
        offsets.append(offset)
        offset += len(_text(tokenizer, t.token_id))
        top = {shown(index): max(logprob, LEAST) for index, logprob in t.top}
        tops.append({**top, texts[-1]: max(t.logprob, LEAST)})
    return {
        "text_offset": offsets,
        "token_logprobs": [max(t.logprob, LEAST) for t in tokens],
        "tokens": texts,
        "top_logprobs": tops,
    }
