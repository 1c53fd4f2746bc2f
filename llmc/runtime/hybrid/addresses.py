"""Where a prefill side listens: tcp://HOST:PORT, or unix:PATH on one host."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from llmc.errors import InputError

_TCP, _UNIX = "tcp://", "unix:"


@dataclass(frozen=True)
class Address:
    """A host and port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Address | None:
        """The address that `text` is; None for what is none, as a bundle's path. Raises InputError for half of one."""
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
        """A socket that is connected, and blocks. Raises OSError."""
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
