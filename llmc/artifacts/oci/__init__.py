"""Bundles and packed caches as OCI images in registries and image layouts, which Kubernetes can mount as image volumes.

An image has one layer for every big blob and 16 for the small ones. Their digests depend only on the blobs, so bundles
that share weights share layers: in a registry, in a layout and on a node that mounts them. A packed cache is one layer,
as tools that mount such caches expect.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from llmc.artifacts.oci.base import Images
from llmc.artifacts.oci.reference import Reference, is_reference, parse_reference
from llmc.artifacts.remotes.base import JOBS, Meter, TransferReport

if TYPE_CHECKING:
    from llmc.artifacts.bundle.trust import Trust
    from llmc.artifacts.remotes.transfer import Signs
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.store import Store

__all__ = ["is_reference", "pull_bundle", "pull_image", "push_image"]


def push_image(
    store: Store, entry: Entry, reference: str, *, jobs: int = JOBS, signer: Signs | None = None,
    progress: Meter | None = None,
) -> TransferReport:  # fmt: skip
    """Push the bundle or packed cache of an entry; `signer` signs what is pushed, not what is in the store.

    The report counts layers and config. Blobs that exist are skipped, and `entries` is 0 if nothing was new.
    `reference` is oci://host[:port]/name[:tag] or oci-layout:folder[:tag]; a digest is accepted only if it is the
    image's own. The image gets its name last. Raises InputError for an invalid reference, ArtifactError for a damaged
    entry, RemoteError if the registry fails or refuses, CapacityError or UnwritableError for a layout that cannot be
    written, DeviceError for missing packages.
    """
    from llmc.artifacts.oci.transfer import push

    location = parse_reference(reference)
    with closing(_open(location)) as images:
        return push(store, entry, images, location, jobs=jobs, signer=signer, progress=progress)


def pull_bundle(
    store: Store, reference: str, *, trust: Trust, jobs: int = JOBS, progress: Meter | None = None
) -> tuple[Entry, TransferReport]:
    """Pull a bundle as `pull_image` does. Raises ArtifactError for a packed cache, without fetching its layers."""
    return pull_image(store, reference, trust=trust, jobs=jobs, progress=progress, bundles_only=True)


def pull_image(
    store: Store, reference: str, *, trust: Trust, jobs: int = JOBS, progress: Meter | None = None,
    bundles_only: bool = False,
) -> tuple[Entry, TransferReport]:  # fmt: skip
    """Pull a bundle or packed cache into the store; return its entry and a report of the layers moved.

    The manifest and its signature come first: nothing else is fetched unless `trust` accepts them. Every byte is
    verified. Received blobs are kept when a later one fails, so pulling again moves only the rest. Raises as
    `push_image` does, ArtifactError for anything but an llmc image, and UntrustedError.
    """
    from llmc.artifacts.oci.transfer import pull

    location = parse_reference(reference)
    with closing(_open(location)) as images:
        return pull(
            store, images, location, trust=trust, jobs=jobs, progress=progress, bundles_only=bundles_only
        )  # fmt: skip


def _open(reference: Reference) -> Images:
    if reference.folder is not None:
        from llmc.artifacts.oci.layout import ImageLayout

        return ImageLayout(reference.folder)
    from llmc.artifacts.oci.registry import RegistryImages

    return RegistryImages(reference)
