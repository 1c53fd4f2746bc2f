"""The artifact's description: what is not one, or would leave its folder, is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmc.errors import ArtifactError
from llmc.runtime.executors.lpu.hyperdex import Artifact, is_power_of_two
from tests.hyperdex import LpuHost


def fields(**changes: Any) -> dict[str, Any]:
    found = {
        "format": 1, "devices": 2, "max_length": 48, "low_memory_usage": False, "fast_compile": True,
        "hyperdex": "1.5.1", "files": {"inst/a.bin": "lpu.00000"},
    }  # fmt: skip
    return {name: value for name, value in {**found, **changes}.items() if value is not None}


def test_it_is_read_as_it_was_written(lpu: LpuHost) -> None:
    artifact = Artifact.of(lpu.open())
    assert Artifact.parse(artifact.to_bytes(), lpu.open()) == artifact


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[]", "is not JSON"),
        (b"\xff", "is not JSON"),
        (fields(format=2), "is not of format 1"),
        (fields(devices=3), "says 3 devices"),
        (fields(devices=0), "says 0 devices"),
        (fields(max_length=1), "max_length 1"),
        (fields(devices=True), "lacks members of its format"),
        (fields(hyperdex=None), "lacks members of its format"),
        (fields(more=1), "lacks members of its format"),
        *[
            (fields(files={path: "lpu.00000"}), "not a relative path within a folder")
            for path in ("../x", "/etc/passwd", "a/../../x", "", "a//b", "a/", ".hidden", "a\nb", "é")
        ],
        (fields(files={"a": 1}), "not a relative path within a folder"),
    ],
)
def test_anything_else_is_refused(lpu: LpuHost, data: Any, message: str) -> None:
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    with pytest.raises(ArtifactError, match=message):
        Artifact.parse(raw, lpu.open())


def test_a_file_that_the_bundle_lacks_is_named(lpu: LpuHost, tmp_path: Path) -> None:
    artifact = replace(Artifact.of(lpu.open()), files={"inst/a.bin": "lpu.99999"})
    with pytest.raises(ArtifactError, match=r"the file lpu.99999 of its LPU artifact is missing; compile again"):
        artifact.lay_out(lpu.open(), tmp_path)


def test_powers_of_two() -> None:
    assert [n for n in range(-2, 20) if is_power_of_two(n)] == [1, 2, 4, 8, 16]
