"""Compiled artifacts that have a place of their own, and are loaded from there rather than compiled.

NEURON_COMPILED_ARTIFACTS, as vLLM's guide to Neuron has it: when it points to a compiled model, that one is loaded,
and another configuration passed to the API does not compile it again; when loading fails, the model is compiled with
the configuration given and stored there; when unset, the artifacts are in `neuron-compiled-artifacts` in the
checkpoint's folder.

Here the compiled model is a bundle, loading fails when it is missing or damaged, and a difference between what was
asked for and what was loaded is a warning that names each component.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmc.artifacts.bundle.manifest import Manifest, flat_components, manifest_components, read_manifest
from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.key import ABSENT, Difference, tell
from llmc.artifacts.key import differences as compare
from llmc.artifacts.log import logger
from llmc.errors import ArtifactError
from llmc.paths import expanded

INDICES = {"neuron": "neuron-compiled-artifacts"}
"""Devices whose artifacts have a place of their own, and its name in the checkpoint's folder."""

_ORIGINS = "plan.provenance."
"""Components that say where a plan comes from, and not what it is."""

_EFFECTS = "executable["
"""Components that follow from others, unless they alone differ."""


def path_for(device: str, model: str, named: str | None, locations: Mapping[str, str] = INDICES) -> Path | None:
    """Where the artifacts of a checkpoint for a device belong; None where that is the store's business.

    `named` is the folder that the environment names. Without it there is none for a model that is not a file or a
    folder here.
    """
    device = device.partition(":")[0]
    if device not in locations:
        return None
    if named is not None:
        return expanded(named)
    path = Path(model)
    if path.is_dir():
        return path / locations[device]
    return path.parent / locations[device] if path.is_file() else None


def load(location: Path) -> Manifest | None:
    """The manifest of the intact bundle at `location`; None when there is none, or a damaged one, which a warning says.

    Every blob is verified, by its stamp where that holds.
    """
    try:
        with BundleFiles.open(location) as files:
            for digest in files.manifest.blobs:
                files.path(digest)
            return files.manifest
    except ArtifactError as error:
        if location.exists():
            logger().warning("%s: not loaded, compiled again there: %s", location, error)
        return None


def differences(manifest: Manifest, wanted: Mapping[str, Any]) -> list[Difference]:
    """The components of a bundle that are not what was asked for; empty when it matches.

    `wanted` has members of a manifest, as deep as anything was asked for: {"options": {"dtype": "bf16"}}; what it does
    not mention may be anything. In a difference `mine` is the bundle's, `theirs` what was asked for.
    """
    requested = flat_components(wanted)
    there = manifest_components(manifest)
    found = {name: there[name] for name in requested if name in there}
    return [Difference(name, found.get(name, ABSENT), value) for name, _, value in compare(found, requested)]


@contextmanager
def replacing(location: Path | None) -> Iterator[None]:
    """Around a compile to a place: says afterwards what is different from the bundle that was there before."""
    before = None if location is None else load(location)
    yield
    if before is not None and location is not None:
        every = compare(manifest_components(read_manifest(location)), manifest_components(before))
        found = [item for item in every if not item.name.startswith(_ORIGINS)]
        causes = [item for item in found if not item.name.startswith(_EFFECTS)]
        if found:
            logger().warning("%s: replaced; %s", location, tell(causes or found))


def describe_differences(found: list[Difference]) -> str:
    """All of the differences in one line, what was asked for → what the bundle is."""
    return tell(found, len(found))
