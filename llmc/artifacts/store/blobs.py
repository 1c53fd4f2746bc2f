"""Blobs: immutable files named by the digest of their content, verified when stored and when read."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from llmc.artifacts.atomic_write import (
    BLOB_MODE,
    create_exclusive,
    discard,
    make_folder,
    sync_folder,
    temporary_name,
    write_all,
    writing,
)
from llmc.artifacts.digest import PREFIX, Blob, NotRegularError, digest_bytes, digest_file, open_regular
from llmc.artifacts.flock import flock
from llmc.artifacts.log import logger
from llmc.artifacts.store.layout import Layout
from llmc.artifacts.verified_files import VerifiedFiles, signature
from llmc.errors import ArtifactError

if TYPE_CHECKING:
    from queue import Queue


REMEDY = "choose another store with --cache-dir"
SAVE_STAMPS_FROM = 8 << 20
COPY_BYTES = 4 << 20
HASH_FIRST_BELOW = 8 << 20
T = TypeVar("T")
_GONE = "gone"
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})
_COPY_INSTEAD = frozenset({errno.EXDEV, errno.EPERM, errno.EACCES})
_LINK_FAILS = _COPY_INSTEAD | {errno.EMLINK, errno.ENOTSUP, errno.ENOSYS}


class BlobMissingError(ArtifactError):
    """A blob is not in the store, or was found damaged and quarantined: a miss, to be built again."""


class Blobs:
    """The blobs of one layout.

    A blob appears whole or not at all, and matches its name when it is published. A damaged blob is quarantined when it
    is found. Writing raises CapacityError or UnwritableError and leaves nothing behind.
    """

    def __init__(
        self, layout: Layout, stamps: VerifiedFiles | None = None, claim: Callable[[str], bool] | None = None
    ) -> None:
        """`claim(digest)` marks a blob that was found as in use, and returns whether it still exists."""
        self._layout = layout
        self._stamps = stamps or VerifiedFiles(layout.base)
        self._claim = claim
        self.corrupt = 0
        self.unreadable = 0

    def find(self, digest: str, size: int | None = None, *, verify: bool = True) -> Path | None:
        """Return the path of an intact blob, or None.

        The size is compared if given, the digest if `verify`, unless the file was verified before and is unchanged
        since (verified_files.py). Raises ValueError for an invalid digest.
        """
        path = self._layout.blob(digest)
        try:
            seen = path.stat()
        except OSError as error:
            self._unreadable(path, error)
            return None
        if not stat.S_ISREG(seen.st_mode):
            self._damaged(path, "not a regular file", seen)
            return None
        if size is not None and seen.st_size != size:
            self._damaged(path, f"{seen.st_size} bytes, expected {size}", seen)
            return None
        if verify and not self._stamps.verified(path, digest) and self._rehash(path, digest, seen):
            return None
        return path

    def reread(self, digest: str) -> str | None:
        """Return what is wrong with a blob, by reading all of it, ignoring its stamp; None if it is intact or gone."""
        path = self._layout.blob(digest)
        try:
            seen = path.stat()
        except OSError as error:
            if not path.is_symlink():
                return None
            problem = f"a link that leads nowhere ({error.strerror})"
            self._damaged(path, problem, None)
            return problem
        found = self._rehash(path, digest, seen)
        return None if found == _GONE else found

    def read(self, digest: str) -> bytes | None:
        """Return a blob's content, verified as read, or None. Raises ValueError for an invalid digest."""
        path = self._layout.blob(digest)
        try:
            seen = path.stat()
            with open_regular(path) as file:
                data = file.read()
        except NotRegularError:
            self._damaged(path, "not a regular file", None)
            return None
        except OSError as error:
            self._unreadable(path, error)
            return None
        if digest_bytes(data) != digest:
            self._damaged(path, "content has another digest", seen)
            return None
        return data

    def put_bytes(self, data: bytes | bytearray | memoryview) -> Blob:
        """Store `data`; an existing intact blob is kept."""
        view = memoryview(data).cast("B")
        if view.nbytes >= HASH_FIRST_BELOW:
            with self._writer(view.nbytes) as stream:
                for at in range(0, view.nbytes, COPY_BYTES):
                    stream.write(view[at : at + COPY_BYTES], kept=True)
            return Blob(stream.digest, stream.tell())
        blob = Blob(digest_bytes(view), view.nbytes)
        if not self._has(blob):
            with writing(self._layout.base, blob.size, REMEDY), self._new(blob.size) as (fd, temporary):
                write_all(fd, view)
                self.publish(fd, temporary, blob)
        return blob

    def put_file(self, path: str | Path, *, move: bool = False, link: bool = False) -> Blob:
        """Store the content of a file; `move` consumes the file, by renaming it where possible.

        `link` makes the blob another name of the file, if that is read-only and on this file system. Raises
        ArtifactError if the file cannot be read or is not a regular one.
        """
        source = Path(path)
        with _open_source(source) as file:
            before = os.fstat(file.fileno())
            if not (move or link):
                return self._copy(file, source, before.st_size)
            digest = _read_source(source, lambda: PREFIX + hashlib.file_digest(file, "sha256").hexdigest())
            blob = Blob(digest, before.st_size)
            if not self._has(blob):
                done = (move and self._adopt(file, source, before, blob)) or (link and self._link(source, before, blob))
                if not done:
                    file.seek(0)
                    blob = self._copy(file, source, blob.size)
        if move:
            discard(source)
        return blob

    @contextmanager
    def writer(self) -> Iterator[BlobWriter]:
        """Yield a stream into a blob, which is published if the block ends well and discarded if it raises."""
        with self._writer(0) as stream:
            yield stream

    def _has(self, blob: Blob) -> bool:
        """Whether an intact blob exists, which is then protected for whoever stores it again."""
        return self.find(*blob) is not None and (self._claim is None or self._claim(blob.digest))

    def _copy(self, file: FileIO, source: Path, needed: int) -> Blob:
        """Copy an open file; the blob is named by what was written, even if the source changes."""
        with self._writer(needed) as stream:
            while piece := _read_source(source, lambda: file.read(COPY_BYTES)):
                stream.write(piece)
        return Blob(stream.digest, stream.tell())

    @contextmanager
    def _writer(self, needed: int) -> Iterator[BlobWriter]:
        with self._new(needed) as (fd, temporary):
            with closing(BlobWriter(fd, temporary, REMEDY)) as stream:
                yield stream
                stream.settle()
                blob = Blob(stream.digest, stream.tell())
            if not self._has(blob):
                self.publish(fd, temporary, blob)
            stream.blob = blob

    def _adopt(self, file: FileIO, source: Path, before: os.stat_result, blob: Blob) -> bool:
        """Rename a file of this file system to a blob; False if it should be copied.

        Links, files with further names (someone may write through those) and files that changed since `before` are
        copied.
        """
        with suppress(OSError):
            now = source.lstat()
            if signature(now) != signature(before) or not stat.S_ISREG(now.st_mode) or now.st_nlink != 1:
                return False
        with writing(self._layout.base, blob.size, REMEDY):
            try:
                self._install(file.fileno(), source, blob)
            except OSError as error:
                if error.errno in _COPY_INSTEAD:
                    return False
                raise
        return True

    def _link(self, source: Path, before: os.stat_result, blob: Blob) -> bool:
        if before.st_mode & 0o222:
            return False
        with writing(self._layout.base, blob.size, REMEDY):
            make_folder(self._layout.temporaries)
            temporary = temporary_name(self._layout.temporaries)
            try:
                os.link(os.path.realpath(source), temporary)
                fd = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    if os.fstat(fd).st_ino != before.st_ino:
                        return False
                    self._install(fd, temporary, blob)
                finally:
                    os.close(fd)
            except OSError as error:
                if error.errno in _LINK_FAILS:
                    return False
                raise
            finally:
                discard(temporary)
        return True

    @contextmanager
    def _new(self, needed: int) -> Iterator[tuple[int, Path]]:
        """Yield a new temporary file, open for writing; removed at the end unless it was published."""
        with writing(self._layout.base, needed, REMEDY):
            make_folder(self._layout.temporaries)
            temporary = temporary_name(self._layout.temporaries)
            fd = create_exclusive(temporary)
            flock(fd)
        try:
            yield fd, temporary
        finally:
            os.close(fd)
            discard(temporary)

    def publish(self, fd: int, temporary: Path, blob: Blob) -> None:
        """Make a file in this store's folder of temporaries, open as `fd` and found to be `blob`, that blob."""
        with writing(self._layout.blob(blob.digest), blob.size, REMEDY):
            self._install(fd, temporary, blob)

    def _install(self, fd: int, path: Path, blob: Blob) -> None:
        """Give a complete file its final name, durably; after OSError it has its old name."""
        final = self._layout.blob(blob.digest)
        make_folder(final.parent)
        if os.fstat(fd).st_mode & 0o777 != BLOB_MODE:
            os.fchmod(fd, BLOB_MODE)
        os.fsync(fd)
        os.rename(path, final)  # noqa: PTH104
        try:
            sync_folder(final.parent)
        except OSError:
            os.rename(final, path)  # noqa: PTH104
            raise

    def _rehash(self, path: Path, digest: str, seen: os.stat_result) -> str | None:
        """Return what is wrong with a file's content, and quarantine it; None, and record a stamp, if it is intact."""
        try:
            found = digest_file(path)
            problem = None if found == digest else f"content has digest {found}"
        except NotRegularError:
            problem = "not a regular file"
        except OSError as error:
            return self._unreadable(path, error)
        if problem is not None:
            self._damaged(path, problem, seen)
            return problem
        self._stamps.record(path, digest, signature(seen))
        if seen.st_size >= SAVE_STAMPS_FROM:
            self._stamps.save()
        return None

    def _unreadable(self, path: Path, error: OSError) -> str:
        """Return the message for a file that is missing or could not be checked; it stays where it is."""
        if error.errno in _ABSENT:
            return _GONE
        self.unreadable += 1
        logger().warning("%s: cannot be read (%s); counted as a miss", path, error.strerror)
        return f"cannot be read ({error.strerror})"

    def _damaged(self, path: Path, reason: str, seen: os.stat_result | None) -> None:
        self.corrupt += 1
        self._layout.set_aside(path, reason, seen)


def _open_source(path: Path) -> FileIO:
    mode = _read_source(path, path.stat).st_mode
    if not stat.S_ISREG(mode):
        raise ArtifactError(f"{path}: only a regular file can be stored")
    return _read_source(path, lambda: FileIO(path))


def _read_source(path: Path, read: Callable[[], T]) -> T:
    """Convert OSError to ArtifactError: an unreadable source is not the store's error."""
    try:
        return read()
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror})") from error


BESIDE_FROM = 256 << 10
SYNC_FROM = 8 << 20
DEPTH = 16


class BlobWriter:
    """A write-only stream into a new blob; `blob` is set when the stream has been published.

    Large pieces are hashed on another core while they are written and synced.
    """

    def __init__(self, fd: int, path: Path, remedy: str) -> None:
        self._fd = fd
        self._path = path
        self._remedy = remedy
        self._hasher = _Hasher()
        self._size = 0
        self.blob: Blob | None = None

    def write(self, data: bytes | bytearray | memoryview, *, kept: bool = False) -> int:
        """Append `data`; return its length in bytes. Raises CapacityError or UnwritableError.

        `kept`: the caller leaves `data` unchanged until the stream is published, so that hashing need not be waited
        for.
        """
        view = memoryview(data).cast("B")
        self._hasher.update(view)
        try:
            with writing(self._path, self._size + view.nbytes, self._remedy):
                write_all(self._fd, view)
        finally:
            if not (kept or isinstance(data, bytes)):
                self._hasher.wait()
        self._size += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        """Return the bytes written so far."""
        return self._size

    def flush(self) -> None:
        """Do nothing: nothing is held back."""

    def settle(self) -> None:
        """Sync a large blob to disk while the rest of it is hashed. Raises CapacityError or UnwritableError."""
        if self._size >= SYNC_FROM:
            with writing(self._path, self._size, self._remedy):
                os.fsync(self._fd)

    def close(self) -> None:
        """End the hashing; nothing can be written any more."""
        self._hasher.close()

    @property
    def digest(self) -> str:
        """Digest of the bytes written so far."""
        return PREFIX + self._hasher.hexdigest()


class _Hasher:
    """sha256 in the order of `update`; a thread hashes large pieces, with at most DEPTH of them queued."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._pieces: Queue[memoryview | None] | None = None

    def update(self, view: memoryview) -> None:
        if view.nbytes < BESIDE_FROM:
            self.wait()
            self._hash.update(view)
            return
        if self._pieces is None:
            from queue import Queue

            self._pieces = Queue(DEPTH)
            threading.Thread(target=self._run, args=(self._pieces,), daemon=True).start()
        self._pieces.put(view)

    def wait(self) -> None:
        if self._pieces is not None:
            self._pieces.join()

    def hexdigest(self) -> str:
        self.wait()
        return self._hash.hexdigest()

    def close(self) -> None:
        if self._pieces is not None:
            self._pieces.put(None)
            self._pieces.join()
            self._pieces = None

    def _run(self, pieces: Queue[memoryview | None]) -> None:
        while (view := pieces.get()) is not None:
            self._hash.update(view)
            del view
            pieces.task_done()
        pieces.task_done()
