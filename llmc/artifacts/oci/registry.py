"""Images in a registry: OCI distribution-spec 1.1, with requests, logged in with oras.

The oras library is used only for logging in (docker's configuration, credential helpers, bearer tokens): its transfers
hold a whole blob in memory, do not resume, and wait up to two minutes before they give up on a wrong password.

A `WWW-Authenticate` challenge is answered with the account that `docker login` stored in ~/.docker/config.json, or with
none, for an anonymous token. Credentials go to the registry, and to the token service that it names if that is on the
registry's own host, on a host of a parent domain, or on a host that the setting LLMC_TOKEN_HOSTS names. They go over
HTTPS, or over plain HTTP on this machine. They never appear in an error or a log.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from http.cookiejar import DefaultCookiePolicy
from typing import Any, NoReturn, TypeVar
from urllib.parse import urljoin, urlsplit

from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.oci.base import MEND, Content
from llmc.artifacts.oci.image import MANIFEST_TYPE, MAX_MANIFEST_BYTES, Descriptor
from llmc.artifacts.oci.reference import LATEST, REGISTRY, Reference, is_loopback
from llmc.artifacts.oci.tar import PIECE
from llmc.artifacts.remotes.base import RemoteError
from llmc.artifacts.remotes.retry import PATIENT, Patience, again, http_status
from llmc.errors import ArtifactError
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
        self.header: str | None = None
        """The value of the Authorization header, once known."""
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

    def answer(self, refused: Any, sent: str | None) -> bool:
        """Whether there is another header to try, after a response that `refused` the header `sent`.

        Raises what `requests` raises if the token service fails.
        """
        with self._lock:
            if self.header != sent:
                return True
            self.header = self._log_in(refused)
            return self.header is not None

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


TIMEOUT = (10.0, 60.0)
"""Timeouts in seconds, for connecting and for silence."""
CONNECTIONS = 16
RECEIVED = 128 << 10
"""Bytes per read from a connection, and the most that is lost when it breaks."""
LOGINS = 3
"""Attempts at a request: without a login, with one that expired or is for reading only, with a fresh one."""
LONGEST_REASON = 64 << 10
_TORN_LINK = "DIGEST_INVALID"
"""Temporary error of Docker's registry (2.8) for a manifest, whose request states no digest.

It occurs while another push writes the link to a blob that both have: the file is empty for a moment.
"""
_DIGEST = "Docker-Content-Digest"
_OK, _CREATED, _ACCEPTED, _PARTIAL, _UNAUTHORIZED, _FORBIDDEN, _MISSING = 200, 201, 202, 206, 401, 403, 404
T = TypeVar("T")


class RegistryImages:
    """The images of one repository of one registry (a `base.Images`); safe for threads."""

    def __init__(self, reference: Reference, patience: Patience = PATIENT) -> None:
        scheme = "http" if reference.plain_http else "https"
        self._host = str(reference.host)
        self._base = f"{scheme}://{self._host}/v2/{reference.name}"
        self._patience = patience
        self._session = _session(proxies=not reference.plain_http)
        self._login = Login(self._host, self._session, plain_http=reference.plain_http)
        self.name = f"{REGISTRY}{self._host}/{reference.name}"

    def close(self) -> None:
        self._session.close()

    def manifest(self, reference: Reference) -> bytes | None:
        def get() -> tuple[bytes | None, str]:
            with self._send("GET", self._manifest_url(reference), (_OK, _MISSING), {"Accept": MANIFEST_TYPE}) as answer:
                if answer.status_code == _MISSING:
                    return None, ""
                data = b""
                for piece in answer.iter_content(PIECE):
                    data += piece
                    if len(data) > MAX_MANIFEST_BYTES:
                        raise ArtifactError(f"{reference}: its manifest is larger than {MAX_MANIFEST_BYTES} bytes")
                return data, answer.headers.get(_DIGEST, "")

        data, said = self._again("read a manifest of", get)
        expected = reference.digest or said
        if data is not None and expected and digest_bytes(data) != expected:
            raise ArtifactError(
                f"{reference}: the registry returned a manifest of digest {digest_bytes(data)}, "
                f"not {expected:.80}; {MEND}"
            )
        return data

    def has(self, blob: Descriptor) -> bool:
        def head() -> bool:
            with self._send("HEAD", self._blob_url(blob), (_OK, _MISSING)) as answer:
                return bool(answer.status_code == _OK)

        return self._again("look into", head)

    def read(self, blob: Descriptor) -> Generator[bytes, None, None]:
        """Yield the unverified content of a blob; a broken connection resumes at the byte where it broke."""
        at = 0
        pieces = self._from(blob, at)

        def next_piece() -> bytes:
            nonlocal pieces
            piece = next(pieces, b"")
            if not piece:
                pieces = self._from(blob, at)
                piece = next(pieces, b"")
            return piece

        try:
            while at < blob.size:
                piece = self._again(f"read {blob.digest} of", next_piece)
                if not piece:
                    raise RemoteError(f"{self.name}: {blob.digest} ends after {at} of {blob.size} bytes; {MEND}")
                at += len(piece)
                yield piece
        finally:
            pieces.close()

    def add(self, blob: Descriptor, content: Content) -> None:
        """Store a blob with one request; after a break, the whole blob is sent again."""

        def put() -> str:
            with self._send("POST", f"{self._base}/blobs/uploads/", (_ACCEPTED,)) as answer:
                where = self._upload_url(answer, blob)
            headers = {"Content-Type": "application/octet-stream"}
            with self._send("PUT", where, (_CREATED,), headers, lambda: _Body(content(), blob.size)) as answer:
                return str(answer.headers.get(_DIGEST, blob.digest))

        self._check_stored(blob.digest, self._again(f"send {blob.digest} to", put))

    def publish(self, reference: Reference, manifest: bytes) -> bool:
        from requests import HTTPError

        digest = digest_bytes(manifest)
        url = self._manifest_url(reference)

        def put() -> str | None:
            with self._send("HEAD", url, (_OK, _MISSING), {"Accept": MANIFEST_TYPE}) as answer:
                if answer.status_code == _OK and answer.headers.get(_DIGEST) == digest:
                    return None
            try:
                with self._send("PUT", url, (_CREATED,), {"Content-Type": MANIFEST_TYPE}, lambda: manifest) as answer:
                    return str(answer.headers.get(_DIGEST, digest))
            except HTTPError as error:
                error.passes = _TORN_LINK in str(error)
                raise

        stored = self._again("send a manifest to", put)
        if stored is not None:
            self._check_stored(digest, stored)
        return stored is not None

    def _from(self, blob: Descriptor, at: int) -> Generator[bytes, None, None]:
        """Yield the bytes of a blob from `at`, until its end or until the connection breaks."""
        headers = {"Range": f"bytes={at}-{blob.size - 1}"} if at else {}
        with self._send("GET", self._blob_url(blob), (_OK, _PARTIAL, _MISSING), headers) as answer:
            if answer.status_code == _MISSING:
                raise ArtifactError(f"{self.name}: {blob.digest} is missing there; {MEND}")
            partial = answer.status_code == _PARTIAL
            if partial and not answer.headers.get("Content-Range", "").startswith(f"bytes {at}-"):
                raise RemoteError(
                    f"{self.name}: the registry returned another part of {blob.digest} than was requested"
                )
            skip = 0 if partial else at
            for piece in answer.iter_content(RECEIVED):
                if len(piece) > skip:
                    yield piece[skip:]
                skip = max(0, skip - len(piece))

    def _send(
        self, method: str, url: str, expected: tuple[int, ...], headers: Mapping[str, str] | None = None,
        body: Callable[[], Any] | None = None,
    ) -> Any:  # fmt: skip
        """Return the response, open for reading, with one of the expected statuses."""
        own = urlsplit(url)[:2] == urlsplit(self._base)[:2]
        for _ in range(LOGINS):
            sent = self._login.header
            authorization = {"Authorization": sent} if own and sent else {}
            answer = self._session.request(
                method, url, headers={**(headers or {}), **authorization}, data=body() if body else None,
                stream=True, allow_redirects=method in {"GET", "HEAD"},
            )  # fmt: skip
            if answer.status_code in expected:
                return answer
            reason = _reason(answer)
            answer.close()
            if answer.status_code != _UNAUTHORIZED or not own or not self._login.answer(answer, sent):
                break
        self._refuse(answer, reason)

    def _refuse(self, answer: Any, reason: str) -> NoReturn:
        """Raise the error for a status; a temporary failure raises requests' error, so that it is retried."""
        status = answer.status_code
        if status in {_UNAUTHORIZED, _FORBIDDEN}:
            raise RemoteError(
                f"{self.name}: access denied (status {status}); "
                f"log in with `docker login {self._host}` to an account that may do this"
            )
        from requests import HTTPError

        raise HTTPError(f"status {status}{reason}", response=answer)

    def _again(self, what: str, call: Callable[[], T]) -> T:
        from requests import RequestException
        from requests.exceptions import SSLError

        try:
            return again(call, self._patience, f"{self.name}: to {what} the registry")
        except (RequestException, ValueError) as error:  # ValueError: a redirect without a URL
            status = http_status(error)
            reason = str(error) if status else type(error).__name__
            remedy = f"check that {self._host} is the registry and that it is reachable"
            if status:
                remedy = "try again later"
            elif isinstance(error, SSLError):
                remedy = "check its certificate; REQUESTS_CA_BUNDLE names the file of a private authority"
            raise RemoteError(f"{self.name}: cannot {what} the registry ({reason}); {remedy}") from None

    def _upload_url(self, answer: Any, blob: Descriptor) -> str:
        try:
            url = urljoin(answer.url, answer.headers.get("Location", ""))
            parts = urlsplit(url)
        except ValueError:
            parts = urlsplit("")
        if parts.scheme != urlsplit(self._base).scheme:
            raise RemoteError(f"{self.name}: the registry gave no upload URL for a blob, or one of another protocol")
        return f"{url}{'&' if parts.query else '?'}digest={blob.digest}"

    def _check_stored(self, digest: str, stored: str) -> None:
        if stored != digest:
            raise ArtifactError(
                f"{self.name}: {digest} was sent, and the registry says it stored {stored!r:.80}; push again"
            )

    def _manifest_url(self, reference: Reference) -> str:
        return f"{self._base}/manifests/{reference.digest or reference.tag or LATEST}"

    def _blob_url(self, blob: Descriptor) -> str:
        return f"{self._base}/blobs/{blob.digest}"


class _Body:
    """Content of known length, which requests then sends in pieces with that length."""

    def __init__(self, pieces: Iterable[bytes], size: int) -> None:
        self._pieces = pieces
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._pieces)


def _session(*, proxies: bool) -> Any:
    """Create a session with timeouts and without cookies; `Login` sets the Authorization header.

    Without `proxies`, the environment's proxies are ignored: they do not know this machine's registries.
    """
    try:
        import requests
        from requests.adapters import HTTPAdapter
    except ImportError:
        raise missing("requests") from None

    session = requests.Session()
    session.request = partial(session.request, timeout=TIMEOUT)
    session.trust_env = proxies
    session.headers["Accept-Encoding"] = "identity"  # a compressed response cannot be resumed
    session.auth = lambda request: request
    session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
    for prefix in ("https://", "http://"):
        session.mount(prefix, HTTPAdapter(pool_maxsize=CONNECTIONS))
    return session


def _reason(answer: Any) -> str:
    with suppress(ValueError, KeyError, IndexError, TypeError, OSError):  # requests' errors are OSError
        code = json.loads(answer.raw.read(LONGEST_REASON))["errors"][0]["code"]
        if isinstance(code, str) and code.replace("_", "").isalnum():
            return f", {code:.40}"
    return ""
