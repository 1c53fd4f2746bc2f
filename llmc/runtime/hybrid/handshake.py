"""The beginning of a connection: versions, the proof of a shared key by both sides, and the server's facts.

    server: hello   {"version", "nonce", "keyed"}      nonces are 32 random bytes in hexadecimal
    client: proof   {"version", "nonce", "proof"}      HMAC-SHA256 over "client", both nonces; "" where no key is set
    server: welcome {"proof", "facts", "bound"}        over "server", both nonces; facts.py, only behind a right proof

The key itself is never sent, and a recorded proof is of no use with another nonce. What follows is neither encrypted
nor signed frame by frame: a key keeps strangers out, but not who can read or change the network's packets.
"""

from __future__ import annotations

import hmac
import secrets
from typing import TYPE_CHECKING, Any

from llmc.errors import ArtifactError, DeviceError
from llmc.runtime.hybrid.facts import Facts
from llmc.runtime.hybrid.wire import VERSION, Frames, WireError

if TYPE_CHECKING:
    from collections.abc import Mapping

HANDSHAKE_S = 5.0
"""Seconds that a peer has for each message of it."""
MAX_BOUND = 1 << 16


class RefusedError(WireError):
    """The peer has not the key, or another version."""


def welcome(frames: Frames, key: str | None, facts: Facts, bound: int) -> None:
    """The server's side; raises WireError or OSError for a client that may not come in."""
    nonce = secrets.token_hex(32)
    frames.send({"kind": "hello", "version": VERSION, "nonce": nonce, "keyed": key is not None})
    answer = _next(frames, "proof")
    theirs = _nonce(answer)
    if answer.get("version") != VERSION:
        raise RefusedError(f"version {answer.get('version')!r:.20} of the protocol, this is {VERSION}")
    if key is not None and not hmac.compare_digest(_proof(key, "client", nonce, theirs), str(answer.get("proof"))):
        raise RefusedError("a wrong key")
    mine = "" if key is None else _proof(key, "server", nonce, theirs)
    frames.send({"kind": "welcome", "proof": mine, "facts": facts.to_json(), "bound": bound})


def enter(frames: Frames, key: str | None, where: str) -> tuple[Facts, int]:
    """The client's side: the server's facts, and how many prompts it computes ahead of what is taken.

    Raises DeviceError where the key or the version is not the server's, WireError or OSError where it answers as no
    server would.
    """
    hello = _next(frames, "hello")
    if hello.get("version") != VERSION:
        raise ArtifactError(
            f"{where}: the prefill side speaks version {hello.get('version')!r:.20} of the protocol, this side "
            f"{VERSION}; use one version of llmc on both"
        )
    theirs, nonce = _nonce(hello), secrets.token_hex(32)
    if bool(hello.get("keyed")) != (key is not None):
        raise DeviceError(
            f"{where}: the prefill side asks for {'a key' if key is None else 'no key'}; set LLMC_PREFILL_KEY on both "
            "sides, to the same text, or on neither"
        )
    proof = "" if key is None else _proof(key, "client", theirs, nonce)
    frames.send({"kind": "proof", "version": VERSION, "nonce": nonce, "proof": proof})
    try:
        answer = _next(frames, "welcome")
    except EOFError:
        raise DeviceError(f"{where}: the prefill side refuses the key; set the same LLMC_PREFILL_KEY on both") from None
    wanted = "" if key is None else _proof(key, "server", theirs, nonce)
    if not hmac.compare_digest(wanted, str(answer.get("proof"))):
        raise DeviceError(f"{where}: who listens there does not know the key; nothing was sent to it")
    bound = answer.get("bound")
    if type(bound) is not int or not 1 <= bound <= MAX_BOUND:
        raise WireError(f"a bound of {bound!r:.20}")
    return Facts.from_json(answer.get("facts")), bound


def _next(frames: Frames, kind: str) -> Mapping[str, Any]:
    header = frames.receive(HANDSHAKE_S)
    if header is None:
        raise EOFError
    if header.get("kind") != kind or frames.payload:
        raise WireError(f"{header.get('kind')!r:.20} where {kind} is due")
    return header


def _nonce(message: Mapping[str, Any]) -> str:
    nonce = message.get("nonce")
    if not isinstance(nonce, str) or len(nonce) != 64 or not nonce.isascii():
        raise WireError("a nonce of another length")
    return nonce


def _proof(key: str, side: str, server: str, client: str) -> str:
    return hmac.digest(key.encode(), f"llmc prefill {VERSION} {side} {server} {client}".encode(), "sha256").hex()
