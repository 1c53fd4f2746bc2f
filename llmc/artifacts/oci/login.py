"""Registry login with the oras library: docker's configuration, credential helpers, bearer tokens.

A `WWW-Authenticate` challenge is answered with the account that `docker login` stored in ~/.docker/config.json, or with
none, for an anonymous token. Credentials go to the registry, and to the token service that it names if that is on the
registry's own host, on a host of a parent domain, or on a host that the setting LLMC_TOKEN_HOSTS names. They go over
HTTPS, or over plain HTTP on this machine. They never appear in an error or a log.
"""

from __future__ import annotations

import re
import threading
from typing import Any

from llmc.artifacts.oci.reference import is_loopback
from llmc.artifacts.remotes.base import RemoteError
from llmc.platforms import missing
from llmc.settings import token_hosts

_KNOWN_PAIRS = frozenset(
    {(registry, "auth.docker.io") for registry in ("docker.io", "index.docker.io", "registry-1.docker.io")}
)
"""Registries whose token service is on a host of its own (Docker Hub)."""
_REALM = re.compile(r'\brealm="(https?)://([^/"?#]+)[^"]*"', re.IGNORECASE)


class Login:
    """The login to one repository of one registry; safe for threads."""

    def __init__(self, host: str, session: Any, *, plain_http: bool) -> None:
        try:
            from oras.auth import get_auth_backend
            from oras.container import Container
        except ImportError:
            raise missing("oras") from None
        self._host = host
        self._plain_http = plain_http
        self._lock = threading.Lock()
        self._header: str | None = None
        container = Container("bundle", registry=host)
        self._backends = {}
        try:
            for scheme, name in (("basic", "basic"), ("bearer", "token")):
                backend = get_auth_backend(name, session, insecure=plain_http)
                backend.load_configs(container)
                self._backends[scheme] = backend
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RemoteError(
                f"{host}: ~/.docker/config.json or its credential helper does not work ({type(error).__name__}); "
                f"log in again with `docker login {host}`"
            ) from None

    @property
    def header(self) -> str | None:
        """The value of the Authorization header, once known."""
        return self._header

    def answer(self, refused: Any, sent: str | None) -> bool:
        """Whether there is another header to try, after a response that `refused` the header `sent`.

        Raises what `requests` raises if the token service fails.
        """
        with self._lock:
            if self._header != sent:
                return True
            self._header = self._log_in(refused)
            return self._header is not None

    def _log_in(self, refused: Any) -> str | None:
        challenge = refused.headers.get("WWW-Authenticate", "")
        scheme = challenge.partition(" ")[0].lower()
        backend = self._backends.get(scheme)
        if backend is None or (scheme == "basic" and not _has_account(backend)):
            return None
        if scheme == "bearer":
            self._require_own(challenge, has_account=bool(getattr(backend, "_basic_auth", None)))
        headers, changed = backend.authenticate_request(refused, {}, refresh=True)
        found = headers.get("Authorization")
        return str(found) if changed and found else None

    def _require_own(self, challenge: str, *, has_account: bool) -> None:
        """Raise RemoteError for a token service that may receive nothing, or no account."""
        realm = _REALM.search(challenge)
        if realm is None or not (realm[1].lower() == "https" or (self._plain_http and is_loopback(realm[2]))):
            raise RemoteError(f"{self._host}: its token service is not reached by HTTPS, so nothing is sent there")
        location = realm[2].lower()
        own = location == self._host.lower() or (_host(self._host), _host(location)) in _KNOWN_PAIRS
        own = own or (is_loopback(self._host) and is_loopback(location))
        parent = _host(self._host).endswith(f".{_host(location)}") and "." in _host(location)
        if has_account and not (own or parent or _host(location) in token_hosts()):
            raise RemoteError(
                f"{self._host}: the registry names a token service on another host, {location:.200}, so the account of "
                f"`docker login {self._host}` is not sent there; if that host is the registry's: "
                f"LLMC_TOKEN_HOSTS={_host(location):.200}"
            )


def _host(location: str) -> str:
    return re.sub(r":\d+$", "", location.rpartition("@")[2].lower())


def _has_account(backend: Any) -> bool:
    """Whether a Basic backend found an account; without one its header is missing or says None."""
    try:
        return bool(backend.get_auth_header() != {"Authorization": "Basic None"})
    except AttributeError:
        return False
