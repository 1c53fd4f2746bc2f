"""Wire protocol between the prefill and decode sides: frames of prompts and prefixes over a stream socket.

    frame   = u32 length of the header, u64 length of the payload, header, payload        numbers little endian
    header  = JSON object in UTF-8, at most MAX_HEADER bytes; "kind" says which
    prefix  = payload of kind "prefix": float32 logits [V], then each layer's key and value in turn,
              [kv_heads, length, head_dim] as "dtype": "f32", "f16" or "bf16"
    prompt  = payload of kind "prompt": int64 token ids

A receiver checks the length of a payload before it allocates memory, and reads tensors in place.
If a peer sends anything unexpected, the connection ends without an answer.

A connection begins with versions, the proof of a shared key by both sides, and the server's facts:

    server: hello   {"version", "nonce", "keyed"}      nonces are 32 random bytes in hexadecimal
    client: proof   {"version", "nonce", "proof"}      HMAC-SHA256 over "client", both nonces; "" where no key is set
    server: welcome {"proof", "facts", "bound"}        over "server", both nonces; facts.py, only after a valid proof

The key itself is never sent, and a recorded proof is useless with another nonce. Later frames are neither encrypted
nor signed. A key therefore keeps strangers out, but does not protect against someone who can read or change packets.
"""

from __future__ import annotations

import hmac
import json
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from llmc.errors import ArtifactError, DeviceError, InputError, LlmcError
from llmc.runtime.bfloat16 import from_bfloat16, to_bfloat16
from llmc.runtime.disaggregated.facts import SideFacts
from llmc.strict_json import loads_object

VERSION = 1
MAX_HEADER = 1 << 20
STALLED_S = 30.0
"""Seconds without a byte inside a frame after which the sender counts as gone."""
HANDSHAKE_S = 5.0
"""Seconds to wait for each handshake message."""
MAX_BOUND = 1 << 16
_HEAD = struct.Struct("<IQ")
_PIECE = 1 << 16
_TCP, _UNIX = "tcp://", "unix:"

Dtype = Literal["f32", "f16", "bf16"]
_WIDTHS: dict[Dtype, int] = {"f32": 4, "f16": 2, "bf16": 2}
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class PeerAddress:
    """Address of a prefill side: tcp://HOST:PORT, or unix:PATH on this host."""

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> PeerAddress | None:
        """Parse an address; None if `text` is something else, such as a bundle's path.

        Raises InputError for an incomplete address.
        """
        if text.startswith(_UNIX):
            if not text.removeprefix(_UNIX):
                raise InputError(f"{text}: no path behind unix:")
            return cls(path=text.removeprefix(_UNIX))
        if not text.startswith(_TCP):
            return None
        host, _, port = text.removeprefix(_TCP).rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not (port.isascii() and port.isdecimal()) or not 0 <= int(port) <= 65535:
            raise InputError(f"{text}: an address is tcp://HOST:PORT, or unix:PATH")
        return cls(host, int(port))

    def connect(self, timeout_s: float) -> socket.socket:
        """Return a connected, blocking socket. Raises OSError."""
        if self.path:
            found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                found.settimeout(timeout_s)
                found.connect(self.path)
            except BaseException:
                found.close()
                raise
        else:
            found = socket.create_connection((self.host, self.port), timeout_s)
        found.settimeout(None)
        return found

    def __str__(self) -> str:
        if self.path:
            return f"{_UNIX}{self.path}"
        return f"{_TCP}[{self.host}]:{self.port}" if ":" in self.host else f"{_TCP}{self.host}:{self.port}"


class WireError(LlmcError):
    """The received bytes are not the expected frame; the connection is unusable."""


class RefusedError(WireError):
    """The peer has another key or another protocol version."""


def narrower(one: str, other: str) -> Dtype:
    """Return the dtype in which a prefix travels between caches of these two: the narrower that loses nothing needed.

    A float32 cache holds float16 values exactly; in the other direction the receiving cache would round anyway. Neither
    float16 nor bfloat16 holds the other, so those travel as float32.
    """
    if one == other:
        return _known(one)
    if "f32" not in (one, other):
        return "f32"
    return _known(other if one == "f32" else one)


def _known(dtype: str) -> Dtype:
    for known in _WIDTHS:
        if dtype == known:
            return known
    return "f32"


class Frames:
    """Frames of one connection. One thread may send while another receives; no method is called concurrently with
    itself.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        if connection.family != getattr(socket, "AF_UNIX", None):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _keep_alive(connection)
        self._left = 0
        """Unread bytes of the current payload."""
        # a timeout of the socket itself would also apply to the thread that sends
        self._readable = selectors.DefaultSelector()
        self._readable.register(connection, selectors.EVENT_READ)

    def send(self, header: dict[str, Any], payload: bytes | memoryview = b"") -> None:
        """Send a frame from one buffer. Raises OSError if the peer is gone."""
        self._socket.sendall(_head(header, len(payload)) + bytes(payload))

    def send_prefix(self, header: dict[str, Any], logits: Floats, prefix: Sequence[Floats], dtype: Dtype) -> int:
        """Send a "prefix" frame tensor by tensor; return the bytes of its payload."""
        size = logits.nbytes + sum(tensor.size for tensor in prefix) * _WIDTHS[dtype]
        self._socket.sendall(_head({"kind": "prefix", "dtype": dtype, **header}, size))
        self._socket.sendall(_bytes(logits))
        for tensor in prefix:
            self._socket.sendall(_bytes(_packed(tensor, dtype)))
        return size

    def receive(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """Return the header of the next frame, or None at the end of the stream between two frames.

        Waits at most `timeout_s` for the header (None: no limit for its first byte). Read or skip the payload before
        the next call. Raises WireError, or OSError if the peer is gone.
        """
        if self._left:
            raise RuntimeError("the payload of the previous frame was not read")
        ends = None if timeout_s is None else time.monotonic() + timeout_s
        head = bytearray(_HEAD.size)
        self._wait(timeout_s)
        if not self._socket.recv_into(memoryview(head)[:1]):
            return None
        self._fill(memoryview(head)[1:], ends)
        length, payload = _HEAD.unpack(head)
        if length > MAX_HEADER:
            raise WireError(f"a frame whose header has {length} bytes")
        text = bytearray(length)
        self._fill(memoryview(text), ends)
        try:
            header = loads_object(bytes(text))
        except ValueError as e:
            raise WireError(f"a frame whose header is not JSON: {e}") from e
        self._left = payload
        return header

    @property
    def payload(self) -> int:
        """Unread bytes of the payload."""
        return self._left

    def take(self, most: int) -> bytearray:
        """Read the payload. Raises WireError if it has more than `most` bytes."""
        if self._left > most:
            raise WireError(f"a payload of {self._left} bytes where at most {most} are due")
        data = bytearray(self._left)
        self._fill(memoryview(data))
        self._left = 0
        return data

    def take_prefix(
        self, vocab_size: int, shapes: Sequence[tuple[int, int, int]], dtype: Dtype
    ) -> tuple[Floats, list[Floats]]:
        """Read the logits [V] and tensors of a "prefix" payload. Raises WireError unless its size is exact."""
        sizes = [heads * length * width for heads, length, width in shapes]
        if self._left != 4 * vocab_size + sum(sizes) * _WIDTHS[dtype]:
            raise WireError(f"a prefix of {self._left} bytes, which does not fit its prompt")
        logits = np.empty(vocab_size, np.float32)
        self._fill(_bytes(logits))
        prefix = []
        for shape, size in zip(shapes, sizes, strict=True):
            raw = np.empty(size, {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[dtype])
            self._fill(_bytes(raw))
            prefix.append(_unpacked(raw, dtype).reshape(shape))
        self._left = 0
        return logits, prefix

    def skip(self, most: int) -> None:
        """Read and discard the payload. Raises WireError if it has more than `most` bytes."""
        if self._left > most:
            raise WireError(f"a payload of {self._left} bytes where at most {most} are due")
        piece = memoryview(bytearray(min(self._left, _PIECE)))
        while self._left:
            part = piece[: min(len(piece), self._left)]
            self._fill(part)
            self._left -= len(part)

    def close(self) -> None:
        """Shut the connection down, which also wakes threads that wait on it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Close the socket, once no thread uses it."""
        self._readable.close()
        self._socket.close()

    def _wait(self, timeout_s: float | None) -> None:
        if not self._readable.select(timeout_s):
            raise WireError("nothing came in time")

    def _fill(self, target: memoryview, ends: float | None = None) -> None:
        while target:
            self._wait(STALLED_S if ends is None else max(0.0, ends - time.monotonic()))
            count = self._socket.recv_into(target)
            if not count:
                raise WireError("the connection ended in the middle of a frame")
            target = target[count:]


def _head(header: dict[str, Any], payload: int) -> bytes:
    text = json.dumps(header, allow_nan=False).encode()
    return _HEAD.pack(len(text), payload) + text


def _packed(tensor: Floats, dtype: Dtype) -> NDArray[Any]:
    if dtype == "f16":
        with np.errstate(over="ignore"):
            return tensor.astype(np.float16)
    return to_bfloat16(tensor) if dtype == "bf16" else tensor


def _unpacked(raw: NDArray[Any], dtype: Dtype) -> Floats:
    if dtype == "f16":
        return raw.astype(np.float32)
    return from_bfloat16(raw) if dtype == "bf16" else raw


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


def _keep_alive(connection: socket.socket) -> None:
    """Enable TCP keep-alive so that a vanished host is noticed within a minute, where the system allows it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def welcome(frames: Frames, key: str | None, facts: SideFacts, bound: int) -> None:
    """Run the server's side of the handshake. Raises WireError or OSError if the client is rejected."""
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


def enter(frames: Frames, key: str | None, where: str) -> tuple[SideFacts, int]:
    """Run the client's side of the handshake; return the server's facts and its bound of computed prompts.

    Raises DeviceError if key or version differ, and WireError or OSError for invalid answers.
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
            f"{where}: the prefill side requires {'a key' if key is None else 'no key'}; set the same LLMC_PREFILL_KEY "
            "on both sides, or on neither"
        )
    proof = "" if key is None else _proof(key, "client", theirs, nonce)
    frames.send({"kind": "proof", "version": VERSION, "nonce": nonce, "proof": proof})
    try:
        answer = _next(frames, "welcome")
    except EOFError:
        raise DeviceError(f"{where}: the prefill side refuses the key; set the same LLMC_PREFILL_KEY on both") from None
    wanted = "" if key is None else _proof(key, "server", theirs, nonce)
    if not hmac.compare_digest(wanted, str(answer.get("proof"))):
        raise DeviceError(f"{where}: the server there does not know the key; no prompt was sent to it")
    bound = answer.get("bound")
    if type(bound) is not int or not 1 <= bound <= MAX_BOUND:
        raise WireError(f"a bound of {bound!r:.20}")
    return SideFacts.from_json(answer.get("facts")), bound


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
