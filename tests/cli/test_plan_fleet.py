"""`llmc plan --fleet`: what a fleet costs, and from how many nodes on its cold start is too long."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from llmc.cli.main import main
from llmc.fleet.simulate import GBIT
from llmc.testing.toy import write_toy
from tests.cli.conftest import BUNDLE, surround
from tests.cli.helpers import Llmc
from tests.cli.test_extras import reported, without
from tests.tiers import default_cases

SMALL = {
    "registry": {"gbit_per_s": 0.000001, "connections": 4}, "nodes": {"gbit_per_s": 0.000001, "downloads": 1},
    "peers": {"chunk_mib": 0.001},
}  # fmt: skip
"""A network on which a toy takes seconds."""
CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 99,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two bundles of one toy, by other plans, and the store of their compile."""
    folder = tmp_path_factory.mktemp("fleet")
    toy = write_toy(folder / "toy")
    with pytest.MonkeyPatch.context() as patch:
        surround(patch, folder, folder / "cache")
        assert main([str(word) for word in ("compile", toy, *BUNDLE)]) == 0
        shorter = ("--device", "fake", "--max-model-len", 16, "--max-num-seqs", 2, "-o", "shorter", "-q")
        assert main([str(word) for word in ("compile", toy, *shorter)]) == 0
    return folder


@pytest.fixture
def fleet(bundles: Path, here: Path, tmp_path: Path) -> Any:
    """Writes a fleet's file and returns its name; members replace those of one with two bundles and a model."""
    for name in ("bundle", "shorter"):
        shutil.copytree(bundles / name, here / name)
    shutil.copytree(bundles / "cache", tmp_path / "cache")
    (here / "config.json").write_text(json.dumps(CONFIG))
    models = [
        {"bundle": "bundle", "replicas": 3},
        {"bundle": "shorter", "replicas": 2},
        {"model": "config.json", "device": ["onnxruntime", "cuda:h100"], "replicas": 2,
         "planning": {"max_model_len": 64, "max_num_seqs": 2}, "options": {"dtype": "f32"}},
    ]  # fmt: skip

    def write(**members: Any) -> str:
        (here / "fleet.yaml").write_text(yaml.safe_dump({"models": models, **SMALL, **members}))
        return "fleet.yaml"

    return write


@pytest.mark.parametrize("name", ["--fleet", "fleet"])
def test_the_report_says_what_a_fleet_costs_and_where_it_breaks(llmc: Llmc, fleet: Any, name: str) -> None:
    ran = llmc("plan", name, fleet(), "--nodes", "5,20", "--max-cold-start", "1h")
    assert ran.code == 0, ran
    for words in (
        "compile time: ", "MB more if entries shared no blob", "median of the builds of", "9 nodes at once",
        "config.json cuda:h100, ", "above 60.0 min at", "seed 0",
    ):  # fmt: skip
        assert words in ran.out, words


def test_json_counts_a_shared_blob_once_and_is_the_same_every_time(llmc: Llmc, fleet: Any, here: Path) -> None:
    one, two = (llmc("plan", "--fleet", fleet(), "--nodes", "5", "--json").json for _ in range(2))
    assert one == two != llmc("plan", "--fleet", fleet(seed=1), "--nodes", "5", "--json").json
    weights = json.loads((here / "bundle" / "manifest.json").read_text())["blobs"]
    other = json.loads((here / "shorter" / "manifest.json").read_text())["blobs"]
    shared = sum(size for blob, size in weights.items() if blob in other)
    assert one["artifact_bytes_unshared"] - one["artifact_bytes"] == shared > 0
    built, _, cpu, gpu = one["entries"]
    assert built["measured"]["executables"] and not cpu["measured"]["executables"]
    assert (built["basis"], cpu["basis"]) == ("in part", "estimated")
    assert gpu["device_bytes"] > 0 == cpu["device_bytes"]
    assert [len(starts) for starts in one["together"].values()] == [4] * 4


def test_ways_of_pulling_differ_as_they_should(llmc: Llmc, fleet: Any, here: Path) -> None:
    models = [{"bundle": "bundle", "replicas": 1}]
    found = llmc(
        "plan", "--fleet", fleet(models=models), "--nodes", "2,64", "--max-cold-start", "20000h", "--json"
    ).json
    (entry,) = found["entries"]
    registry, before, layers, chunks = entry["scales"]
    assert [one["way"] for one in entry["scales"]] == ["registry", "pre-pulled", "peers, layers", "peers, chunks"]
    assert 2 <= registry["doubles_at"] <= 3 and registry["beyond_at"] is None
    assert before["doubles_at"] is None and before["starts"][-1]["p99_s"] == pytest.approx(entry["start_s"])
    last = {one["way"]: one["starts"][-1] for one in entry["scales"]}
    assert last["registry"]["p99_s"] > last["peers, layers"]["p99_s"] > last["peers, chunks"]["p99_s"]
    assert last["pre-pulled"]["before_s"] == pytest.approx(64 * entry["size"] / (1e-6 * GBIT))
    alone = pytest.approx(registry["starts"][0])
    assert layers["starts"][0] == alone and chunks["starts"][0] == alone, "one node has no peers"


def test_the_plot_is_the_same_every_time(llmc: Llmc, fleet: Any, here: Path) -> None:
    described = fleet(models=[{"bundle": "bundle", "replicas": 2}], max_cold_start_s=9)
    for name in ("a.html", "b.html", "a.png"):
        assert llmc("plan", "--fleet", described, "--nodes", "9", "--plot", name).code == 0
    assert (here / "a.html").read_bytes() == (here / "b.html").read_bytes()
    assert (here / "a.png").stat().st_size > 10_000 and "nodes at once" in (here / "a.html").read_text()


def test_a_plan_file_stands_for_planning(llmc: Llmc, fleet: Any, here: Path) -> None:
    limits = ("--max-model-len", 64, "--max-num-seqs", 2)
    assert llmc("plan", "--config", "config.json", *limits, "-o", "plan.json", "-q").code == 0
    one = {"model": "config.json", "device": "onnxruntime", "replicas": 1}
    by_plan, by_flags = (
        llmc("plan", "--fleet", fleet(models=[{**one, **more}]), "--nodes", "2", "--json").json["entries"][0]
        for more in ({"plan": "plan.json"}, {"planning": {"max_model_len": 64, "max_num_seqs": 2}})
    )
    assert by_plan["compile_s"] == by_flags["compile_s"] and by_plan["size"] == by_flags["size"]


BAD = [
    ({"models": []}, "models: [] should be non-empty"),
    ({"models": [{"bundle": "bundle", "replicas": 0}]}, "models[0].replicas: 0 is less than the minimum of 1"),
    ({"models": [{"bundle": "bundle", "replicas": -3}]}, "models[0].replicas: -3 is less than the minimum of 1"),
    ({"models": [{"bundle": "bundle", "replicas": True}]}, "models[0].replicas: True is not of type 'integer'"),
    ({"models": [{"bundle": "bundle", "replica": 1}]}, "did you mean 'replicas'?"),
    ({"models": [{"replicas": 1}]}, "models[0]: name a bundle, or a model and its device"),
    ({"models": [{"bundle": "b", "model": "m", "replicas": 1}]}, "models[0]: name a bundle, or a model and its device"),
    ({"models": [{"bundle": "b", "device": "cpu", "replicas": 1}]}, "was compiled already; leave out device"),
    ({"models": [{"model": "m", "plan": "p", "planning": {}, "replicas": 1}]}, "give one of them"),
    ({"registry": {"gbit_per_s": 0}}, "registry.gbit_per_s: 0 is less than or equal to the minimum of 0"),
    ({"nodes": {"gbit_per_s": -1}}, "nodes.gbit_per_s: -1 is less than or equal to the minimum of 0"),
    ({"registry": {"gbit_per_s": float("nan")}}, "neither YAML nor JSON"),
    ({"registry": {"gbit_per_s": float("inf")}}, "neither YAML nor JSON"),
    ({"registry": {"bandwidth": 1}}, "unknown key 'bandwidth'; known: gbit_per_s, connections"),
    ({"node": {}}, "unknown key 'node'; known: models, registry, nodes, back_off, peers, max_cold_start_s, seed; did"),
    ({"peers": {"uploads": 0}}, "peers.uploads: 0 is less than the minimum of 1"),
    ({"seed": -1}, "seed: -1 is less than the minimum of 0"),
]


@default_cases(6)
@pytest.mark.parametrize(("members", "words"), BAD, ids=[words for _, words in BAD])
def test_a_bad_file_is_one_line_that_says_where(llmc: Llmc, fleet: Any, members: dict[str, Any], words: str) -> None:
    said = llmc("plan", "--fleet", fleet(**members)).failed(2)
    assert said.startswith("fleet.yaml: ") and words in said


@pytest.mark.parametrize("text", ["models: [", "a: b: c", "\t- x", "[1, 2]", "", "when: 2024-01-01"])
def test_what_is_no_fleet_is_reported(llmc: Llmc, here: Path, text: str) -> None:
    (here / "fleet.yaml").write_text(text)
    assert llmc("plan", "--fleet", "fleet.yaml").failed(2).startswith("fleet.yaml: ")


def test_a_missing_file_is_reported(llmc: Llmc) -> None:
    assert "cannot read the fleet nowhere.yaml" in llmc("plan", "--fleet", "nowhere.yaml").failed(2)


@pytest.mark.parametrize(
    ("entry", "code", "words"),
    [
        ({"bundle": "nowhere"}, 5, "nowhere: nowhere: not a bundle (no such file or folder)"),
        ({"model": "config.json", "device": "openvno"}, 2, "config.json: unknown device 'openvno'"),
        ({"model": "config.json", "device": "openvno"}, 2, "did you mean 'openvino'?"),
        ({"model": "config.json", "plan": "nowhere.json"}, 2, "config.json: cannot read the plan nowhere.json"),
        ({"model": "config.json", "planning": {"max_model_len": 999}}, 2, "config.json: --max-model-len 999 is above"),
        ({"model": "config.json", "options": {"quantize": "int3"}}, 2, "config.json: unknown quantisation 'int3'"),
        ({"model": "nowhere/model"}, 1, "nowhere/model: "),
    ],
)
def test_an_entry_that_cannot_be_planned_is_named(
    llmc: Llmc, fleet: Any, entry: dict[str, Any], code: int, words: str
) -> None:
    assert words in llmc("plan", "--fleet", fleet(models=[{**entry, "replicas": 1}])).failed(code)


@pytest.mark.parametrize("flags", [("--nodes", "0"), ("--nodes", "a"), ("--nodes", "1,,2"), ("--max-cold-start", "0"),
                                   ("--plot", "x.txt")])  # fmt: skip
def test_bad_flags_are_one_line(llmc: Llmc, fleet: Any, flags: tuple[str, str]) -> None:
    llmc("plan", "--fleet", fleet(), *flags).failed(2)


def test_without_jsonschema_the_extra_is_named(llmc: Llmc, fleet: Any) -> None:
    reported(without("jsonschema", "plan", "--fleet", fleet()), "fleet")


def test_the_schema_is_one_and_the_documented_file_keeps_it() -> None:
    schema = json.loads((files("llmc.fleet") / "fleet.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    guide = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    example = guide.partition("```yaml\n# fleet.yaml\n")[2].partition("```")[0]
    jsonschema.Draft202012Validator(schema).validate(yaml.safe_load(example))
