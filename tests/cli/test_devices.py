"""`llmc devices`: what this host can compile for and run on, what it would take, and the TPU slices there are."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from llmc.compiler.pipeline import survey
from llmc.compiler.targets.declared import devices
from llmc.runtime.executors.xla import client
from tests.cli.helpers import Llmc

FIELDS = {"device", "compiles", "runs", "state", "note", "topologies"}
SHOWN = ["cpu", "hpu", "onnxruntime", "openvino", "tpu", "xla"]
EVERYTHING = "torch", "transformers", "safetensors", "gguf", "onnx", "onnxruntime", "openvino", "jax", "libtpu"


def rows(llmc: Llmc) -> dict[str, dict[str, Any]]:
    return {row["device"]: row for row in llmc("devices", "--json").json}


@pytest.fixture(autouse=True)
def everything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with every package and no TPU, whatever this one is."""
    without(monkeypatch)
    monkeypatch.setattr(client, "has_tpu", lambda: False)


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """A host on which `packages` are not installed, and all others are."""
    monkeypatch.setattr(survey, "find_spec", lambda name: None if name in packages else find_spec("json"))


def test_a_row_for_every_device_but_the_one_for_tests(llmc: Llmc) -> None:
    ran = llmc("devices")
    header, *lines = ran.out.splitlines()
    assert (ran.code, ran.err) == (0, "")
    assert header.split("  ")[0].strip() == "device"
    assert all(title in header for title in ("compiles here", "runs here", "executables", "note"))
    listed = [line.split()[0] for line in lines[: lines.index("")]]
    assert listed == [name for name in devices() if name != "fake"] == SHOWN


def test_json_has_the_same_fields_for_every_device(llmc: Llmc) -> None:
    found: list[dict[str, Any]] = llmc("devices", "--json").json
    assert all(set(row) == FIELDS for row in found)
    assert [row["device"] for row in found] == SHOWN


def test_cpu_is_native_and_gaudi_portable_with_what_is_left_in_words(llmc: Llmc) -> None:
    found = rows(llmc)
    assert found["cpu"] == {
        "device": "cpu", "compiles": "yes", "runs": "yes", "state": "native", "note": "", "topologies": [],
    }  # fmt: skip
    assert (found["hpu"]["compiles"], found["hpu"]["runs"]) == ("yes", "on CPU, portable")
    assert found["hpu"]["state"] == "portable"
    assert "Gaudi host" in found["hpu"]["note"]


def test_xla_compiles_and_runs_here_and_a_tpu_is_compiled_for_without_one(llmc: Llmc) -> None:
    found = rows(llmc)
    assert (found["xla"]["compiles"], found["xla"]["runs"], found["xla"]["state"]) == ("yes", "yes", "native")
    assert (found["tpu"]["compiles"], found["tpu"]["runs"]) == ("yes", "no: needs a TPU host")


def test_on_a_tpu_host_a_tpu_runs(llmc: Llmc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "has_tpu", lambda: True)
    assert rows(llmc)["tpu"]["runs"] == "yes"


def test_a_missing_compiler_comes_with_the_line_that_installs_it(llmc: Llmc, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "torch", "onnx")
    found = rows(llmc)
    assert found["cpu"]["compiles"] == "no: pip install 'llmc[compile]' (missing torch, onnx)"
    assert found["cpu"]["runs"] == "yes"
    assert found["hpu"]["runs"] == "no: pip install 'llmc[compile]'"
    assert "pip install 'llmc[compile]'" in llmc("devices").out


def test_each_device_misses_only_what_it_needs(llmc: Llmc, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "jax", "libtpu", "onnx")
    found = rows(llmc)
    assert found["cpu"]["compiles"].endswith("(missing onnx)")
    assert found["xla"]["compiles"] == "no: pip install 'llmc[compile,xla]' (missing jax)"
    assert found["tpu"]["compiles"] == "no: pip install 'llmc[compile,tpu]' (missing jax, libtpu)"
    assert found["xla"]["runs"] == found["tpu"]["runs"] == "no: pip install 'llmc[xla]'"


def test_a_missing_runtime_comes_with_the_line_that_installs_it(llmc: Llmc, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "onnxruntime")
    assert rows(llmc)["cpu"]["runs"] == "no: pip install onnxruntime"


def test_every_package_that_a_device_runs_with_has_a_line_that_installs_it(
    llmc: Llmc, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, *EVERYTHING)
    for row in rows(llmc).values():
        assert row["compiles"].startswith("no: pip install ") and row["runs"].startswith("no: pip install ")


def test_tpu_slices_are_listed_by_generation_with_the_memory_that_programs_may_take(llmc: Llmc) -> None:
    out = llmc("devices").out
    assert "--device tpu:GENERATION-SHAPE, for example tpu:v5e-2x2" in out
    lines = {line.split()[0]: line.split() for line in out.splitlines() if "GiB" in line}
    assert list(lines) == ["v4", "v5e", "v5p", "v6e", "tpu7x"]
    assert lines["v5e"] == ["v5e", "15.75", "GiB", "1", "1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"]
    assert lines["tpu7x"][1:5] == ["94.75", "GiB", "2", "1x1x1"]


def test_tpu_slices_in_json_have_names_that_device_takes_and_sizes(llmc: Llmc) -> None:
    found = {row["name"]: row for row in rows(llmc)["tpu"]["topologies"]}
    assert found["v5e-2x4"] == {
        "name": "v5e-2x4", "generation": "v5e", "shape": "2x4", "chips": 8, "devices": 8, "hosts": 1,
        "hbm_bytes_per_device": 16125 << 20,
    }  # fmt: skip
    assert all(row["topologies"] == [] for name, row in rows(llmc).items() if name != "tpu")
