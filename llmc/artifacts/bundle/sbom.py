"""A bundle's software bill of materials, from its manifest's provenance, as one CycloneDX 1.6 document.

Source: https://cyclonedx.org/docs/1.6/json/. It contains no time, so the same bundle gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Manifest

SPEC_VERSION = "1.6"


def bill_of_materials(manifest: Manifest) -> dict[str, Any]:
    """Return the document. Data that the manifest lacks or states in another form is left out."""
    from uuid import NAMESPACE_URL, uuid5

    digits = manifest.digest.removeprefix("sha256:")
    name = manifest.model.get("name")
    model = {
        "type": "machine-learning-model",
        "bom-ref": f"bundle:{digits}",
        "name": name if isinstance(name, str) and name else "model",
        "description": f"compiled for {manifest.device} by llmc",
        "hashes": [{"alg": "SHA-256", "content": digits}],
    }
    tool = {"type": "application", "name": "llmc", "version": manifest.llmc}
    components = [found for item in _dependencies(manifest) if (found := _component(item))]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": SPEC_VERSION,
        "serialNumber": f"urn:uuid:{uuid5(NAMESPACE_URL, manifest.digest)}",
        "version": 1,
        "metadata": {"component": model, "tools": {"components": [tool]}},
        "components": components,
        "dependencies": [{"ref": model["bom-ref"], "dependsOn": sorted(item["bom-ref"] for item in components)}],
    }


def _dependencies(manifest: Manifest) -> list[Mapping[str, Any]]:
    definition = manifest.provenance.get("buildDefinition")
    found = definition.get("resolvedDependencies") if isinstance(definition, Mapping) else None
    unique: dict[str, Mapping[str, Any]] = {}
    for item in found if isinstance(found, list) else ():
        if isinstance(item, Mapping) and isinstance(item.get("name"), str) and item["name"]:
            unique.setdefault(item["name"], item)
    return list(unique.values())


def _component(item: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a package by its purl, any other dependency as a file by its digest; empty for neither."""
    from llmc.artifacts.digest import is_digest

    name, purl, digest = item["name"], item.get("uri"), item.get("digest")
    notes = item.get("annotations")
    notes = notes if isinstance(notes, Mapping) else {}
    found: dict[str, Any] = {}
    digits = digest.get("sha256") if isinstance(digest, Mapping) else None
    if is_digest(f"sha256:{digits}"):
        found = {"type": "file", "bom-ref": name, "name": name}
        found["hashes"] = [{"alg": "SHA-256", "content": digits}]
    if isinstance(purl, str) and purl.startswith("pkg:"):
        found |= {"type": "library", "bom-ref": purl, "name": name, "purl": purl}
        if isinstance(notes.get("version"), str):
            found["version"] = notes["version"]
        if isinstance(notes.get("licenseExpression"), str):
            found["licenses"] = [{"expression": notes["licenseExpression"]}]
        elif isinstance(notes.get("licenseName"), str):
            found["licenses"] = [{"license": {"name": notes["licenseName"]}}]
    return found
