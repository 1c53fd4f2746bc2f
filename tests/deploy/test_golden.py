"""Every rendered file as it was last looked at.

After a change on purpose: RENEW=1 pytest tests/deploy/test_golden.py, and look at the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmc.deploy import KINDS
from tests.deploy.bundles import GIVEN, facts, files, on

GOLDEN = Path(__file__).parent / "golden"
CASES = {
    **{kind: (kind, "fake", {}) for kind in GIVEN},
    "compose-cuda": ("compose", "cuda:h100-8", {}),
    "kubernetes-pull": (
        "kubernetes", "fake",
        {"pull": True, "trusted_keys": "keys", "api_key_secret": "key", "allow_from": ("monitoring",), "replicas": 2},
    ),
    "kubernetes-tpu": ("kubernetes", "tpu:v5e-2x2", {}),
    "vllm-cache": (
        "vllm", "fake",
        {"server": "vllm", "device": "cuda:h100", "cache_image": "oci://registry.example.com/caches/toy:h100",
         "tool_image": "registry.example.com/llmc:1", "trusted_keys": "keys"},
    ),
}  # fmt: skip


def test_every_kind_has_a_case() -> None:
    assert sorted(GIVEN) == KINDS.names()


@pytest.mark.parametrize("case", CASES)
def test_rendered_files_are_those_that_were_reviewed(case: str, tmp_path: Path) -> None:
    kind, device, more = CASES[case]
    bundle = tmp_path / "bundle"
    rendered = {
        path.replace(".github", "github"): text.replace(str(bundle), "/srv/bundle")
        for path, text in files(kind, facts(bundle, on(device)), **more).items()
    }
    folder = GOLDEN / case
    if os.environ.get("RENEW"):
        for path, text in rendered.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
    kept = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert kept == rendered
