"""Bundles as OCI images, in registries and in image layouts: what Kubernetes mounts as an image volume.

    reference.py  names: oci://host/name:tag, oci-layout:folder:tag
    tar.py        the archives that layers are
    layers.py     which blobs share a layer
    image.py      image manifest and config
    base.py       the contract of a place for images; verification
    layout.py     a folder
    registry.py, login.py    a registry
    push.py, pull.py

An image has a layer for every big blob and 16 for the small ones, whose digests depend on nothing but the blobs:
bundles that share weights share their layers, in a registry, in a layout and on a node that mounts them.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from llmc.artifacts.oci.base import Images
from llmc.artifacts.oci.reference import Reference, is_reference, parse_reference
from llmc.artifacts.remotes.base import JOBS

if TYPE_CHECKING:
    from llmc.artifacts.bundle.trust import Trust
    from llmc.artifacts.remotes.base import Meter, TransferReport
    from llmc.artifacts.remotes.push import Signs
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.store import Store

__all__ = ["is_reference", "pull_bundle", "push_bundle"]


def push_bundle(
    store: Store, entry: Entry, reference: str, *, jobs: int = JOBS, signer: Signs | None = None,
    progress: Meter | None = None,
) -> TransferReport:  # fmt: skip
    """Push the bundle of an entry; `signer` signs what is pushed, and not what is in the store.

    The report counts layers and config: what was there already is skipped, and `entries` is 0 when nothing at all was
    new. `reference` is oci://host[:port]/name[:tag] or oci-layout:folder[:tag]; by digest only to what the bundle is
    anyway. Raises InputError for a wrong reference, ArtifactError for a damaged bundle, RemoteError where the registry
    fails or refuses, CapacityError or UnwritableError for a layout that cannot be written, DeviceError where packages
    are not installed. Nothing is named before all of it is there.
    """
    from llmc.artifacts.oci.push import push

    place = parse_reference(reference)
    with closing(_open(place)) as images:
        return push(store, entry, images, place, jobs=jobs, signer=signer, progress=progress)


def pull_bundle(
    store: Store, reference: str, *, trust: Trust, jobs: int = JOBS, progress: Meter | None = None
) -> tuple[Entry, TransferReport]:
    """Pull a bundle into the store, the layers that are missing; returns its entry and what was moved.

    The manifest and its signature come first: nothing else is fetched unless `trust` accepts them. Every byte is
    verified, and blobs that came are kept when a later one fails: pulling again moves the rest. Raises as `push_bundle`
    does, ArtifactError for whatever is not exactly the image of a bundle, and UntrustedError.
    """
    from llmc.artifacts.oci.pull import pull

    place = parse_reference(reference)
    with closing(_open(place)) as images:
        return pull(store, images, place, trust=trust, jobs=jobs, progress=progress)


def _open(reference: Reference) -> Images:
    if reference.folder is not None:
        from llmc.artifacts.oci.layout import ImageLayout

        return ImageLayout(reference.folder)
    from llmc.artifacts.oci.registry import Registry

    return Registry(reference)
