"""The listening socket: TCP or Unix."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import stat
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.server.state import ServerState

BACKLOG = 2048
"""Connections that the kernel holds before they are accepted."""
Sockets: TypeAlias = Sequence[socket.socket]
Take: TypeAlias = Callable[[socket.socket, Callable[[], None]], Coroutine[None, None, None]]
"""Serves an accepted connection; calls its second argument when the connection has ended."""


@dataclass(frozen=True)
class Listener:
    """A listening socket and how clients reach it; `path` is the path of a Unix socket."""

    socket: socket.socket
    url: str
    path: Path | None = None

    @property
    def sockets(self) -> Sockets:
        """The sockets that the server accepts connections from."""
        return (self.socket,)

    async def begin(self, take: Take, state: ServerState) -> None:
        """Start passing connections that are accepted elsewhere to `take`; the server over `state` runs."""

    @property
    def local(self) -> bool:
        """Whether only this host can connect."""
        return self.path is not None or ip_address(self.socket.getsockname()[0].partition("%")[0]).is_loopback

    def close(self) -> None:
        """Close the socket and remove the file of a Unix socket."""
        self.socket.close()
        if self.path is not None:
            with suppress(OSError):
                self.path.unlink()


def listen(host: str, port: int, scheme: str = "http") -> Listener:
    """Bind TCP `host`:`port` (0: a free port) and listen. Raises InputError that names the flag."""
    if not 0 <= port <= 65535:
        raise InputError(f"--port {port} is not a port: use 1 … 65535, or 0 for a free one")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, address = found[0][0], found[0][4]
        both = host == "::" and socket.has_dualstack_ipv6()
        bound = socket.create_server(address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except (OSError, UnicodeError) as e:
        raise InputError(_unbound(host, port, e)) from e
    shown = f"[{host}]" if ":" in host else host
    return Listener(bound, f"{scheme}://{shown}:{bound.getsockname()[1]}")


def listen_unix(path: Path) -> Listener:
    """Bind the Unix socket `path`, in place of a killed server's file but never of a live one's. Raises InputError."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_abandoned(path)
        bound.bind(str(path))
        bound.listen(BACKLOG)
    except OSError as e:
        bound.close()
        why = "another server listens there" if e.errno == errno.EADDRINUSE else (e.strerror or str(e))
        raise InputError(f"--uds {path}: the socket cannot be bound: {why}; give another path") from e
    return Listener(bound, f"unix:{path}", path)


def require_certificate(certificate: Path | None, key: Path | None) -> bool:
    """Whether the server is to speak HTTPS. Raises InputError for a certificate and key that cannot be used."""
    if certificate is None:
        if key is not None:
            raise InputError("--ssl-keyfile needs --ssl-certfile")
        return False
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except OSError as error:  # SSLError is one
        files = f"--ssl-certfile {certificate}" + ("" if key is None else f", --ssl-keyfile {key}")
        raise InputError(f"{files}: cannot be used: {error.strerror or error}") from None
    return True


def _remove_abandoned(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            return  # bind then reports that the address is in use
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()


def _unbound(host: str, port: int, error: OSError | UnicodeError) -> str:
    number = error.errno if isinstance(error, OSError) and not isinstance(error, socket.gaierror) else None
    if number == errno.EADDRINUSE:
        return f"port {port} of {host} is in use; give another one with --port, or --port 0 for a free one"
    if number == errno.EACCES:
        return f"port {port} of {host} may not be bound by this user; give one above 1023 with --port"
    why = os.strerror(number) if number else getattr(error, "strerror", None) or str(error)
    return f"{host}:{port} cannot be bound: {why}; give an address of this host with --host, such as 127.0.0.1"
