"""Remotes with fsspec: s3, gs, az, hf, sftp, webdav, memory and other installed protocols.

Options (endpoints, credentials, regions) come from fsspec's configuration files and FSSPEC_<PROTOCOL>_<OPTION>
variables, or from what the vendor's tools read. See
https://filesystem-spec.readthedocs.io/en/latest/features.html#configuration
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from llmc.artifacts.remotes.base import (
    Address,
    ObjectError,
    Progress,
    RemoteError,
    StoppedError,
    temporaries_prefix,
)  # fmt: skip
from llmc.artifacts.remotes.retry import Patience, again, http_status
from llmc.errors import DeviceError, InputError, LlmcError
from llmc.platforms import missing

T = TypeVar("T")

PIECE = 16 << 20
AHEAD = 4
"""Pieces of one object that are requested at once."""

WHOLE_PUTS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "hf", "memory"})
"""Protocols whose objects appear only when complete; elsewhere an object is uploaded under another name and moved."""

S3_PART = 8 << 20
S3_PARTS_AT_ONCE = 4
S3_PARTS = 10_000
"""Parts of an upload to S3: least bytes per part, parts in memory at once, and most parts."""

S3_CONFIG: dict[str, Any] = {
    "connect_timeout": 5,
    "read_timeout": 30,
    "retries": {"max_attempts": 0},
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}
"""Settings of botocore: timeouts in seconds, no retries of its own, and no checksums that only S3 supports.

Other servers answer such checksums wrongly for a part of an object, and every byte is verified by its digest anyway.
"""

PIECE_ATTEMPTS = 2
"""Attempts that a protocol makes at one part of an upload, so that a failure does not repeat all of it."""


class FsspecRemote:
    """A `base.Remote` with fsspec. Raises InputError or DeviceError if the protocol is unavailable."""

    def __init__(self, location: Address, patience: Patience) -> None:
        self.url = location.shown
        self._location = location
        self._patience = patience
        self._protocol = "s3" if location.scheme == "s3a" else location.scheme
        self._fs, self._base = self._open()

    def __repr__(self) -> str:
        return f"FsspecRemote({self.url!r})"

    def size(self, name: str) -> int | None:
        found = self._ask(name, lambda: self._fs.info(self._path(name)))
        return None if found is None or found.get("type") == "directory" else int(found["size"])

    def read(self, name: str, limit: int) -> bytes | None:
        data: bytes | None = self._ask(name, lambda: self._fs.cat_file(self._path(name), start=0, end=limit + 1))
        if data is not None and len(data) > limit:
            raise ObjectError(f"{self.url}: {name} is larger than {limit} bytes; delete it there")
        return data

    def download(self, name: str, start: int, size: int) -> Iterator[bytes]:
        """Pieces are requested in parallel, and each is retried."""
        starts = range(start, size, PIECE)
        if len(starts) <= 1:
            yield from (self._piece(name, at, size) for at in starts)
            return
        with ThreadPoolExecutor(AHEAD, thread_name_prefix="llmc-range") as pool:
            coming: deque[Future[bytes]] = deque()
            try:
                for at in starts:
                    coming.append(pool.submit(self._piece, name, at, size))
                    if len(coming) == AHEAD:
                        yield coming.popleft().result()
                while coming:
                    yield coming.popleft().result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def upload(self, name: str, source: Path | bytes, progress: Progress) -> None:
        put = self._put if self._protocol in WHOLE_PUTS else self._put_aside
        try:
            self._do(name, lambda: put(source, self._path(name), progress))
        except FileNotFoundError as error:
            self._fail(name, error)

    def list(self, prefix: str) -> Iterator[str]:
        base = self._path("")
        for path in self._ask(prefix, lambda: self._fs.find(self._path(prefix))) or ():
            if path.startswith(base):
                yield path[len(base) :]

    def delete(self, name: str) -> None:
        self._ask(name, lambda: self._fs.rm_file(self._path(name)))

    def _open(self) -> tuple[Any, str]:
        try:
            import fsspec
            from fsspec.config import conf
        except ImportError:
            raise missing("fsspec") from None
        options: dict[str, Any] = {"use_listings_cache": False}
        url, scheme = self._location.full, self._location.scheme
        if self._protocol == "s3":
            options["config_kwargs"] = S3_CONFIG | conf.get("s3", {}).get("config_kwargs", {})
            url, login = _without_login(url)
            options |= login
        try:
            fs, base = fsspec.url_to_fs(url, **options)
        except ImportError as error:
            if self._protocol == "s3":
                raise missing("s3fs") from None
            raise DeviceError(f"{scheme}: a package that fsspec needs for it is not installed: {error}") from None
        except ValueError as error:
            raise InputError(f"{self.url}: not a URL of a remote ({self._location.clean(str(error))})") from None
        except Exception as error:  # noqa: BLE001 - each protocol has its own errors, and some connect at once
            self._fail("", error)
        if hasattr(fs, "retries"):
            fs.retries = PIECE_ATTEMPTS
        return fs, base.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}"

    def _piece(self, name: str, at: int, size: int) -> bytes:
        """Return the piece of an object of `size` bytes that begins at byte `at`."""
        end = min(at + PIECE, size)
        beyond = int(end == size)  # one more byte than expected is requested, to check that there is none

        def cat() -> bytes:
            data: bytes = self._fs.cat_file(self._path(name), start=at, end=end + beyond)
            return data

        data = self._ask(name, cat)
        if data is None:
            raise ObjectError(f"{self.url}: {name} is missing; push it again")
        if len(data) != end - at:
            raise ObjectError(f"{self.url}: {name} does not have {size} bytes as it should; push it again")
        return data

    def _put(self, source: Path | bytes, path: str, progress: Progress) -> None:
        if isinstance(source, bytes):
            self._fs.pipe_file(path, source)
            progress(len(source))
            return
        from fsspec.callbacks import Callback

        class Sent(Callback):  # type: ignore[misc]
            """Reports the bytes sent, and takes them back if the upload fails."""

            reported = 0

            def call(self, hook_name: str | None = None, **_: Any) -> None:
                step, self.reported = self.value - self.reported, self.value
                progress(step)

        sent = Sent()
        try:
            size = source.stat().st_size
            self._fs.put_file(str(source), path, callback=sent, **self._put_options(size))
            sent.absolute_update(size)
        except BaseException:
            sent.absolute_update(0)
            raise

    def _put_aside(self, source: Path | bytes, path: str, progress: Progress) -> None:
        aside = self._path(f"{temporaries_prefix()}/{secrets.token_hex(12)}")
        for target in (aside, path):
            self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        try:
            self._put(source, aside, progress)
            self._fs.mv(aside, path)
        except BaseException:
            with suppress(Exception):  # report the error of the upload, not this one
                self._fs.rm_file(aside)
            raise

    def _put_options(self, size: int) -> dict[str, int]:
        if self._protocol != "s3":
            return {}
        return {"chunksize": max(S3_PART, -(-size // S3_PARTS)), "max_concurrency": S3_PARTS_AT_ONCE}

    def _ask(self, name: str, call: Callable[[], T]) -> T | None:
        """Call with retries; None if the object is missing."""
        try:
            return self._do(name, call)
        except FileNotFoundError:
            return None

    def _do(self, name: str, call: Callable[[], T]) -> T:
        try:
            return again(call, self._patience, f"{self.url}: {name}")
        except (FileNotFoundError, LlmcError, StoppedError):
            raise
        except Exception as error:  # noqa: BLE001 - each protocol has its own errors
            self._fail(name, error)

    def _fail(self, name: str, error: Exception) -> NoReturn:
        where = f"{self.url}: {name}" if name else self.url
        status = http_status(error)
        reason = self._location.clean(f"{type(error).__name__}: {error}")[:300]
        if isinstance(error, FileNotFoundError):
            raise RemoteError(f"{where}: no such bucket or folder ({reason}); create it first") from None
        if status == 416:
            raise ObjectError(f"{where} is shorter than it should be; push it again") from None
        if isinstance(error, PermissionError) or status in (401, 403):
            raise RemoteError(
                f"{where}: access refused ({reason}); check the credentials and what they allow"
            ) from None
        if "Credentials" in type(error).__name__:
            raise RemoteError(f"{where}: no credentials ({reason}); set them as the protocol's own tools do") from None
        raise RemoteError(f"{where}: {reason}; try again, finished transfers are not repeated") from None


def _without_login(url: str) -> tuple[str, dict[str, str]]:
    """Return an S3 URL without KEY:SECRET@, and those as options."""
    from urllib.parse import unquote

    scheme, _, rest = url.partition("://")
    location, slash, path = rest.partition("/")
    login, at, bucket = location.rpartition("@")
    key, _, secret = login.partition(":")
    options = {"key": unquote(key), "secret": unquote(secret)} if at else {}
    return f"{scheme}://{bucket}{slash}{path}", options
