"""Far tiers of a store: folders elsewhere and whatever fsspec reaches, behind one small interface.

base.py       the contract of a remote
folder.py     a folder: a mount, another disk
fsspec_remote.py   s3, gs, hf, memory … by fsspec
retry.py      what is tried again, and how often
ingest.py     what arrives in a store; downloads go on where they were cut off
push.py, pull.py   moving what is missing
read_through.py   read-through: what a compile asks before it builds
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmc.artifacts.remotes.base import Remote
    from llmc.artifacts.remotes.retry import Patience


def open_remote(url: str, patience: Patience | None = None) -> Remote:
    """The remote at `url`: a path or file:// is a folder, anything else goes by fsspec. Nothing is asked of it yet.

    Credentials in the URL are used and never shown. Raises InputError for a URL that names nothing, DeviceError
    where a package for it is not installed.
    """
    from llmc.artifacts.remotes.urls import address

    location = address(url)
    if location.scheme in ("", "file"):
        from llmc.artifacts.remotes.folder import FolderRemote

        return FolderRemote(location.full)
    from llmc.artifacts.remotes.fsspec_remote import FsspecRemote
    from llmc.artifacts.remotes.retry import PATIENT

    return FsspecRemote(location, patience or PATIENT)
