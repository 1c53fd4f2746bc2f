"""`llmc devices`: what this host can compile for and run on, and what it would take."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from llmc.compiler import survey
from llmc.compiler.targets import devices
from tests.cli.helpers import Llmc


def rows(llmc: Llmc) -> dict[str, dict[str, str]]:
    return {row["device"]: row for row in llmc("devices", "--json").json}


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """A host on which `packages` are not installed."""
    monkeypatch.setattr(survey, "find_spec", lambda name: None if name in packages else find_spec(name))


def test_a_row_for_every_device_but_the_one_for_tests(llmc: Llmc) -> None:
    ran = llmc("devices")
    header, *lines = ran.out.splitlines()
    assert (ran.code, ran.err) == (0, "")
    assert header.split("  ")[0].strip() == "device"
    assert all(title in header for title in ("compiles here", "runs here", "executables", "note"))
    assert [line.split()[0] for line in lines] == [name for name in devices() if name != "fake"] == ["cpu", "hpu"]


def test_json_has_the_same_fields_for_every_device(llmc: Llmc) -> None:
    found: list[dict[str, Any]] = llmc("devices", "--json").json
    assert all(set(row) == {"device", "compiles", "runs", "state", "note"} for row in found)
    assert [row["device"] for row in found] == ["cpu", "hpu"]


def test_cpu_is_native_and_gaudi_portable_with_what_is_left_in_words(llmc: Llmc) -> None:
    found = rows(llmc)
    assert found["cpu"] == {"device": "cpu", "compiles": "yes", "runs": "yes", "state": "native", "note": ""}
    assert (found["hpu"]["compiles"], found["hpu"]["runs"]) == ("yes", "on CPU, portable")
    assert found["hpu"]["state"] == "portable"
    assert "Gaudi host" in found["hpu"]["note"]


def test_a_missing_compiler_comes_with_the_line_that_installs_it(llmc: Llmc, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "torch", "onnx")
    found = rows(llmc)
    assert found["cpu"]["compiles"] == "no: pip install 'llmc[compile]' (missing torch, onnx)"
    assert found["cpu"]["runs"] == "yes"
    assert found["hpu"]["runs"] == "no: pip install 'llmc[compile]'"
    assert "pip install 'llmc[compile]'" in llmc("devices").out


def test_a_missing_runtime_comes_with_the_line_that_installs_it(llmc: Llmc, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "onnxruntime")
    assert rows(llmc)["cpu"]["runs"] == "no: pip install onnxruntime"
