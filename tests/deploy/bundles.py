"""Bundles for these tests: the golden toy's manifest, with what a test changes in it; nothing else of it is opened."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llmc.deploy import create
from llmc.deploy.base import options_for
from llmc.deploy.facts import BundleFacts
from llmc.runtime.bundle import Bundle
from llmc.settings import Settings
from tests.manifests import edit_manifest

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "v1" / "bundle"
IMAGE = "oci://registry.example.com:5000/models/toy:v1"
GIVEN: Mapping[str, Mapping[str, Any]] = {
    "compose": {},
    "docker": {},
    "github-actions": {"model": "org/toy", "bundle_image": IMAGE, "traffic": "traffic.csv", "max_padding": "25%"},
    "gitlab": {"model": "org/toy", "bundle_image": IMAGE},
    "kserve": {"image": "registry.example.com/llmc:1", "bundle_image": IMAGE, "trusted_keys": "keys"},
    "kubernetes": {"image": "registry.example.com/llmc:1", "bundle_image": IMAGE, "namespace": "models"},
    "opea": {},
    "systemd": {},
    "vllm": {"server": "vllm-gaudi", "model": "org/toy", "image": "vllm/vllm:1"},
}
"""What each kind is asked for, beside the bundle."""


def facts(folder: Path, change: Callable[[dict[str, Any]], object] = lambda document: None) -> BundleFacts:
    """Of a copy of the toy's manifest below `folder`."""
    if not folder.exists():
        shutil.copytree(GOLDEN, folder)
        edit_manifest(folder, change)
    return BundleFacts.of(Bundle.open(folder, Settings.from_environment({})))


def on(device: str) -> Callable[[dict[str, Any]], object]:
    """The same compiled for another device."""
    return lambda document: document.update(device=device, target=device.partition(":")[0])


def named(model: str) -> Callable[[dict[str, Any]], object]:
    """The same of a model of that name."""
    return lambda document: document["model"].update(name=model)


def files(kind: str, of: BundleFacts, **more: Any) -> Mapping[str, str]:
    """What a kind renders, as GIVEN asks; `more` is given, too, None for what is left out."""
    chosen = create(kind)
    given = {"bundle": of, "bundle_path": str(of.bundle.path), **GIVEN[kind], **more}
    return chosen.files(options_for(chosen, given))
