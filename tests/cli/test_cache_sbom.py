"""`llmc cache show BUNDLE --sbom`: the bill of materials, CycloneDX 1.6."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.bundle.manifest import read_manifest
from llmc.artifacts.bundle.sbom import bill_of_materials
from llmc.artifacts.store.store import Store
from tests.artifacts.helpers import manifest as small_manifest
from tests.cli.helpers import Llmc


def test_the_bill_of_materials_lists_packages_files_and_the_model(llmc: Llmc, bundle: Path) -> None:
    found = llmc("cache", "show", bundle, "--sbom").json
    manifest = read_manifest(bundle)
    assert (found["bomFormat"], found["specVersion"], found["version"]) == ("CycloneDX", "1.6", 1)
    assert re.fullmatch(
        r"urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-[1-5][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", found["serialNumber"]
    )
    model = found["metadata"]["component"]
    assert (model["type"], model["name"]) == ("machine-learning-model", "toy")
    assert model["hashes"] == [{"alg": "SHA-256", "content": manifest.digest.removeprefix("sha256:")}]
    components = {item["name"]: item for item in found["components"]}
    assert components["torch"]["purl"].startswith("pkg:pypi/torch@")
    assert components["torch"]["type"] == "library" and "licenses" in components["torch"]
    assert components["checkpoint/model.safetensors"]["type"] == "file"
    assert components["llmc"]["licenses"] == [{"expression": "Apache-2.0"}]
    refs = [item["bom-ref"] for item in found["components"]]
    assert len(set(refs)) == len(refs)
    assert found["dependencies"] == [{"ref": model["bom-ref"], "dependsOn": sorted(refs)}]
    assert llmc("cache", "show", bundle, "--sbom").json == found


def test_a_bundle_in_the_store_has_one_too(llmc: Llmc, bundle: Path, tmp_path: Path) -> None:
    (entry,) = Store(tmp_path / "cache").entries("bundle")
    assert llmc("cache", "show", entry.key.short, "--sbom").json == llmc("cache", "show", bundle, "--sbom").json
    other = Store(tmp_path / "cache").entries("executable")[0]
    assert "is not a bundle" in llmc("cache", "show", other.key.short, "--sbom").failed(5)


DIGITS = "a" * 64
ODD: list[Any] = [
    {}, {"buildDefinition": 1}, {"buildDefinition": {"resolvedDependencies": {}}},
    {"buildDefinition": {"resolvedDependencies": [1, {}, {"name": 1}, {"name": ""}, {"name": "x"}]}},
    {"buildDefinition": {"resolvedDependencies": [{"name": "y", "uri": 5}]}},
    {"buildDefinition": {"resolvedDependencies": [
        {"name": "z", "uri": "https://elsewhere", "digest": {"sha256": "short"}, "annotations": 7},
    ]}},
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_a_provenance_of_another_form_gives_an_empty_bill(odd: dict[str, Any]) -> None:
    found = bill_of_materials(small_manifest(provenance=odd))
    assert found["components"] == []
    assert json.dumps(found)


def test_a_bill_without_a_name_or_with_doubles_is_still_valid() -> None:
    item = {"name": "x", "uri": "pkg:pypi/x@1", "annotations": {"version": 1, "licenseName": ["MIT"]}}
    twice = {"buildDefinition": {"resolvedDependencies": [item, item, {"name": "f", "digest": {"sha256": DIGITS}}]}}
    found = bill_of_materials(small_manifest(provenance=twice, model={"name": 5}))
    assert found["metadata"]["component"]["name"] == "model"
    assert found["components"] == [
        {"type": "library", "bom-ref": "pkg:pypi/x@1", "name": "x", "purl": "pkg:pypi/x@1"},
        {"type": "file", "bom-ref": "f", "name": "f", "hashes": [{"alg": "SHA-256", "content": DIGITS}]},
    ]


def test_show_leaves_the_long_members_to_json(llmc: Llmc, bundle: Path) -> None:
    text = llmc("cache", "show", bundle).out
    assert "buildDefinition" not in text and "  checkpoint: sha256:" in text
    assert llmc("cache", "show", bundle, "--json").json == read_manifest(bundle).to_dict()
