"""Remote tiers of a store: folders elsewhere and whatever fsspec reaches, behind one small interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmc.artifacts.remotes.base import Remote
    from llmc.artifacts.remotes.retry import Patience


def open_remote(url: str, patience: Patience | None = None) -> Remote:
    """Return the remote at `url`: a path or file:// is a folder, anything else uses fsspec. It is not accessed yet.

    Credentials in the URL are used and never shown. Raises InputError for an invalid URL, DeviceError for a missing
    package.
    """
    from llmc.artifacts.remotes.base import address

    location = address(url)
    if location.scheme in ("", "file"):
        from llmc.artifacts.remotes.folder import FolderRemote

        return FolderRemote(location.full)
    from llmc.artifacts.remotes.fsspec_remote import FsspecRemote
    from llmc.artifacts.remotes.retry import PATIENT

    return FsspecRemote(location, patience or PATIENT)
