"""`llmc devices`: what this host can compile for and run on, what it would take, and the slices and GPUs known."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from llmc.compiler.pipeline import survey
from llmc.compiler.targets import devices
from llmc.compiler.targets.xla.tpu import CHIPS
from llmc.platforms import install_line
from llmc.runtime import accelerators
from llmc.runtime.executors.xla import client
from tests.cli.helpers import Llmc

FIELDS = {"device", "compiles", "runs", "state", "note", "topologies", "topology_form", "found", "hardware", "guide"}
ROOT = Path(__file__).parents[2]
EVERYTHING = (
    "torch",
    "transformers",
    "safetensors",
    "gguf",
    "onnx",
    "onnxruntime",
    "openvino",
    "jax",
    "libtpu",
    "jax_cuda13_plugin",
)


def rows(llmc: Llmc) -> dict[str, dict[str, Any]]:
    return {row["device"]: row for row in llmc("devices", "--json").json}


@pytest.fixture(autouse=True)
def everything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with every package and no TPU, whatever this one is."""
    without(monkeypatch)
    monkeypatch.setattr(client, "has_tpu", lambda: False)


@pytest.fixture(autouse=True)
def no_accelerator_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "ROOT", tmp_path)


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """A host on which `packages` are not installed, and all others are."""
    monkeypatch.setattr(survey, "find_spec", lambda name: None if name in packages else find_spec("json"))


def test_a_row_for_every_device_but_the_one_for_tests(llmc: Llmc) -> None:
    ran = llmc("devices")
    here, accelerators, _, header, *lines = ran.out.splitlines()
    assert (ran.code, ran.err) == (0, "")
    assert re.fullmatch(r"this host: .*; \d+ CPUs, [\d.]+ GiB", here)
    assert accelerators == "accelerators: none found"
    assert re.split(r" {2,}", header) == ["device", "compiles here", "runs here", "run on hardware"]
    listed = [line.split()[0] for line in lines[: lines.index("")]]
    assert [name for name in listed if ":" not in name] == [name for name in devices() if name != "fake"]
    assert [name for name in listed if name.startswith("openvino")] == ["openvino", "openvino:GPU", "openvino:NPU"]


def test_a_limit_of_the_cpu_is_reported(llmc: Llmc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmc.runtime.host.host_features", lambda: ("x86_64", "amx_tile", "avx2", "f16c", "fma"))
    monkeypatch.setenv("LLMC_CPU_ISA", "avx2")
    assert " avx2 f16c fma (limited by LLMC_CPU_ISA=avx2); " in llmc("devices").out.splitlines()[0]
    monkeypatch.setenv("LLMC_CPU_ISA", "amx")
    assert llmc("devices").failed(2).startswith("LLMC_CPU_ISA=amx: this CPU lacks amx_bf16, ")


def test_json_has_the_same_fields_for_every_device(llmc: Llmc) -> None:
    found: list[dict[str, Any]] = llmc("devices", "--json").json
    assert all(set(row) == FIELDS for row in found)
    assert {row["device"] for row in found} > {"cpu", "hpu", "onnxruntime", "openvino", "tpu", "xla"}


def test_cpu_is_native_and_gaudi_portable_with_what_is_left_in_words(llmc: Llmc) -> None:
    found = rows(llmc)
    fields = ("compiles", "runs", "state", "note", "topologies")
    assert [found["cpu"][name] for name in fields] == ["yes", "yes", "native", "", []]
    assert (found["hpu"]["compiles"], found["hpu"]["runs"]) == ("yes", "on CPU, portable")
    assert found["hpu"]["state"] == "portable"
    assert "Gaudi host" in found["hpu"]["note"]


def test_without_intels_compiler_an_npu_is_compiled_for_portably_and_the_library_is_named(llmc: Llmc) -> None:
    row = rows(llmc)["openvino:NPU"]
    assert (row["compiles"], row["runs"], row["state"]) == ("yes", "on CPU, portable", "portable")
    assert "libopenvino_intel_npu_compiler.so" in row["note"]


def test_gpus_that_are_here_stand_with_the_device_that_uses_them(llmc: Llmc, tmp_path: Path) -> None:
    for name in ("neuron0", "neuron1"):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()
    pci(tmp_path, "0x1da3", "0x1063", "0x120000")
    pci(tmp_path, "0x10de", "0x2330", "0x030200")
    pci(tmp_path, "0x1002", "0x74a1", "0x120000")
    found = rows(llmc)
    assert found["hpu"]["found"] == ["1 × Intel Gaudi, its driver not loaded (no /dev/accel/accel*)"]
    amd = found["AMD GPU"]
    assert amd["compiles"] == amd["runs"] == "no: no device of llmc is for it"
    assert set(amd) == FIELDS
    assert found["cuda"]["found"] == ["1 × NVIDIA GPU, its driver not loaded (no /dev/nvidia*)"]
    assert "1 × NVIDIA GPU" in llmc("devices").out.splitlines()[1]
    assert "2 × AWS Neuron device" in llmc("devices").out


def pci(root: Path, vendor: str, device: str, kind: str) -> None:
    folder = root / "sys" / "bus" / "pci" / "devices" / f"0000:{vendor}"
    folder.mkdir(parents=True)
    for name, value in (("vendor", vendor), ("device", device), ("class", kind)):
        (folder / name).write_text(f"{value}\n")


def test_what_ran_on_hardware_says_on_what_and_where_its_figures_are_and_the_others_that_nothing_did(
    llmc: Llmc,
) -> None:
    for name, row in rows(llmc).items():
        record = row["hardware"]
        if record["ran"]:
            assert record["machine"] and record["toolchain"] and re.fullmatch(r"20\d\d-\d\d", record["date"]), name
            assert (ROOT / record["source"]).is_file(), name
            assert record["text"] == f"yes: {record['machine']}, {record['toolchain']}"
        else:
            assert record["text"].startswith("no: tested against mocks, not run on hardware; "), name


STATUS = {
    True: "runs here, measured",
    "native": "compiles here, never run on hardware",
    "portable": "needs the vendor's host for the last step",
}


def test_the_table_of_the_readme_says_what_devices_does(llmc: Llmc) -> None:
    """Its rows: names in backticks, and what was run on hardware or else compiles here."""
    cells = [line.strip("| \n").split(" | ") for line in (ROOT / "README.md").read_text().splitlines()]
    begin = next(i for i, row in enumerate(cells) if row[0] == "`--device`")
    named = [row for row in cells[begin + 2 :] if row[0].startswith("`")]
    table = {name: row for row in named for name in re.findall("`([^`]+)`", row[0])}
    found = rows(llmc)
    assert set(found) <= {name.partition(":TOPOLOGY")[0] for name in table}
    for name, row in table.items():
        device = found.get(name.partition(":TOPOLOGY")[0])
        if device is not None:
            assert row[1].startswith(STATUS[device["hardware"]["ran"] or device["state"]]), name


def test_every_device_has_a_page_and_a_row_that_say_whether_it_ran_on_hardware(llmc: Llmc) -> None:
    cells = [line.strip("| ").split(" | ") for line in (ROOT / "docs" / "models.md").read_text().splitlines()]
    table = {name: row for row in cells if len(row) == 4 for name in re.findall("`([^`]+)`", row[0])}
    for name, row in rows(llmc).items():
        page = ROOT / row["guide"]
        assert page.is_file() and f"({page.name})" in table[name][1], name
        ran = row["hardware"]["ran"]
        assert table[name][3].startswith("x86-64" if ran else "no"), name
        begins = page.read_text().split("\n## ")[0]
        assert ran or (f"`{name}`" in begins and "mocks" in begins), name


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
    assert found["cpu"]["compiles"] == f"no: {install_line('compile')} (missing torch, onnx)"
    assert found["cpu"]["runs"] == "yes"
    assert found["hpu"]["runs"] == f"no: {install_line('compile')}"
    assert install_line("compile") in llmc("devices").out


def test_each_device_misses_only_what_it_needs(llmc: Llmc, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "jax", "libtpu", "onnx")
    found = rows(llmc)
    assert found["cpu"]["compiles"].endswith("(missing onnx)")
    assert found["xla"]["compiles"] == f"no: {install_line('compile', 'xla')} (missing jax)"
    assert found["tpu"]["compiles"] == f"no: {install_line('compile', 'tpu')} (missing jax, libtpu)"
    assert found["xla"]["runs"] == found["tpu"]["runs"] == f"no: {install_line('xla')}"


def test_a_missing_runtime_comes_with_the_line_that_installs_it(llmc: Llmc, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "onnxruntime")
    assert rows(llmc)["cpu"]["runs"] == f"no: {install_line()}"


def test_every_package_that_a_device_runs_with_has_a_line_that_installs_it(
    llmc: Llmc, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, *EVERYTHING)
    for row in rows(llmc).values():
        assert row["compiles"].startswith("no: pip install ") and row["runs"].startswith("no: pip install ")


def test_tpu_slices_are_listed_by_generation_with_the_memory_that_programs_may_take(llmc: Llmc) -> None:
    out = llmc("devices").out
    assert "--device tpu:GENERATION-SHAPE, for example tpu:v5e-2x2" in out
    lines = {line.split()[0]: line.split() for line in out.splitlines() if " GiB " in line}
    assert [name for name in lines if name in CHIPS] == ["v4", "v5e", "v5p", "v6e", "tpu7x"]
    assert lines["v5e"] == ["v5e", "15.75", "GiB", "1", "1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"]
    assert lines["tpu7x"][1:5] == ["94.75", "GiB", "2", "1x1x1"]


def test_tpu_slices_in_json_have_names_that_device_takes_and_sizes(llmc: Llmc) -> None:
    found = {row["name"]: row for row in rows(llmc)["tpu"]["topologies"]}
    assert found["v5e-2x4"] == {
        "name": "v5e-2x4", "generation": "v5e", "shape": "2x4", "chips": 8, "devices": 8, "hosts": 1,
        "hbm_bytes_per_device": 16125 << 20,
    }  # fmt: skip
    assert all(row["topologies"] == [] for name, row in rows(llmc).items() if name not in ("tpu", "cuda"))


def test_gpus_are_listed_with_how_many_one_host_has(llmc: Llmc) -> None:
    out = llmc("devices").out
    assert "--device cuda:GPU[-COUNT], for example cuda:h100-8" in out
    lines = {line.split()[0]: line.split() for line in out.splitlines() if " GiB " in line}
    assert lines["h100"] == ["h100", "71.20", "GiB", "1", "1", "2", "4", "8"]
    assert {"h100", "h100-2", "h100-8"} < {row["name"] for row in rows(llmc)["cuda"]["topologies"]}
