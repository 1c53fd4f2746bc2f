"""Compiled artifacts with a location of their own, loaded from there rather than compiled.

vLLM's guide to Neuron defines NEURON_COMPILED_ARTIFACTS. If it points to a compiled model, that model is loaded, and
another configuration passed to the API does not compile it again. If loading fails, the model is compiled with the
given configuration and stored there. If the variable is unset, the artifacts are in `neuron-compiled-artifacts` in the
checkpoint's folder.

Here the compiled model is a bundle, and loading fails if it is missing or damaged. If the loaded bundle differs from
the request, a warning names each component.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmc.artifacts.bundle.manifest import Manifest, flat_components, manifest_components, read_manifest
from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.key import ABSENT, Difference, describe
from llmc.artifacts.key import differences as compare
from llmc.artifacts.log import logger
from llmc.errors import ArtifactError
from llmc.paths import expanded

FOLDER_NAMES = {"neuron": "neuron-compiled-artifacts"}
"""Devices whose artifacts have a location of their own, and its name in the checkpoint's folder."""

_ORIGINS = "plan.provenance."
"""Prefix of components that record where a plan comes from rather than what it is."""

_EFFECTS = "executable["
"""Prefix of components that follow from others; reported only if nothing else differs."""


def path_for(device: str, model: str, named: str | None, locations: Mapping[str, str] = FOLDER_NAMES) -> Path | None:
    """Return the artifact folder of a checkpoint for a device; None if the store decides.

    `named` is the folder that the environment names. Without it, a model that is not a local file or folder has none.
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
    """Return the manifest of the intact bundle at `location`; None if there is none, or a damaged one, which is logged.

    Every blob is verified, by valid stamp or digest.
    """
    try:
        with BundleFiles.open(location) as files:
            for digest in files.manifest.blobs:
                files.path(digest)
            return files.manifest
    except ArtifactError as error:
        if location.exists():
            logger().warning("%s: not loaded, so it is compiled again: %s", location, error)
        return None


def differences(manifest: Manifest, wanted: Mapping[str, Any]) -> list[Difference]:
    """Return the components of a bundle that differ from the request; empty if it matches.

    `wanted` has members of a manifest, as deep as requested: {"options": {"dtype": "bf16"}}; components that it does
    not mention may have any value. In a difference, `mine` is the bundle's value, `theirs` the requested one.
    """
    requested = flat_components(wanted)
    there = manifest_components(manifest)
    found = {name: there[name] for name in requested if name in there}
    return [Difference(name, found.get(name, ABSENT), value) for name, _, value in compare(found, requested)]


@contextmanager
def replacing(location: Path | None) -> Iterator[None]:
    """Around a compile to `location`, log how the new bundle differs from the previous one."""
    before = None if location is None else load(location)
    yield
    if before is not None and location is not None:
        every = compare(manifest_components(read_manifest(location)), manifest_components(before))
        found = [item for item in every if not item.name.startswith(_ORIGINS)]
        causes = [item for item in found if not item.name.startswith(_EFFECTS)]
        if found:
            logger().warning("%s: replaced; %s", location, describe(causes or found))


def describe_differences(found: list[Difference]) -> str:
    """Return all differences in one line, as requested value → the bundle's value."""
    return describe(found, len(found))
