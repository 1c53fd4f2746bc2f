"""Who tells the clients of a process that was killed.

A killed process says nothing, and the kernel closes its connections. So a process hands a copy of each connection that
carries a stream to a small one beside it, which this file is too (`python keeper.py`, without llmc), and which writes
the last words there once the other has gone. Between them is a pipe of messages: first the last words, then a number
with a connection for each stream that begins, and the number alone when it has ended.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count

MESSAGE_BYTES = 4096
_UNSENT = 0x894B
"""Linux's SIOCOUTQNSD: bytes of a TCP connection that were written and not sent yet."""


class Keeper:
    """Writes `last_words`, of MESSAGE_BYTES at most, on the connections that are watched when this process dies."""

    def __init__(self, last_words: bytes) -> None:
        self._pipe, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pipe.send(last_words)
        self._numbers = count()
        with theirs:  # a session of its own: signals to this process's group do not reach it
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__], stdin=theirs.fileno(), start_new_session=True
            )

    @contextmanager
    def watching(self, connection: int) -> Iterator[None]:
        """Watch the connection with this descriptor; between what is written to it, last words may be."""
        number = str(next(self._numbers)).encode()
        with suppress(OSError):  # the keeper or the client is gone: a death is told by the connection's end alone
            socket.send_fds(self._pipe, [number], [connection])
        try:
            yield
        finally:
            with suppress(OSError):
                self._pipe.send(number)

    def close(self) -> None:
        """End it."""
        self._pipe.close()
        self._child.wait()


def _keep() -> None:
    pipe = socket.socket(fileno=0)
    last_words = pipe.recv(MESSAGE_BYTES)
    watched: dict[bytes, int] = {}
    while (received := socket.recv_fds(pipe, MESSAGE_BYTES, 1))[0]:
        number, connections, _, _ = received
        if connections:
            watched[number] = connections[0]
        elif number in watched:
            os.close(watched.pop(number))
    for connection in watched.values():
        with suppress(OSError):
            (unsent,) = struct.unpack("i", fcntl.ioctl(connection, _UNSENT, bytes(4)))
            if not unsent:  # else the client is slow, and what was written last may have been cut
                os.write(connection, last_words)


if __name__ == "__main__":
    _keep()
