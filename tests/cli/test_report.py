"""`llmc report`, and what of a compile it and a CI's cache need: --result and --emit key."""

from __future__ import annotations

import json
from pathlib import Path

from llmc.testing.toy import write_toy
from tests.cli.helpers import Llmc
from tests.manifests import edit_manifest

COMPILE = ("--device", "fake", "--max-model-len", 16, "--max-num-seqs", 1)


def test_graphs_built_and_reused_sizes_padding_numbers_and_the_certificate(llmc: Llmc, toy: Path, here: Path) -> None:
    (here / "traffic.csv").write_text("time,prompt_tokens,output_tokens\n0,10,4\n1,7,3\n")
    for built in (True, False):
        assert llmc("compile", toy, *COMPILE, "-o", "bundle", "--result", "done.json", "-q").code == 0
        done = json.loads((here / "done.json").read_text())
        ran = llmc("report", "bundle", "--compiled", "done.json", "--traffic", "traffic.csv")
        graphs = len(json.loads((here / "bundle" / "manifest.json").read_text())["executables"])
        created = f"{graphs} built, 0 reused" if built else f"0 built, {graphs} reused"
        assert created in ran.out and (done["built"], done["reused"])[built] == 0
    assert "on 2 recorded requests; 0 uncovered" in ran.out and "verified against" in ran.out
    assert "| certificate | none |" in ran.out
    assert llmc("warmup", "bundle", "--certify", "c.json", "--requests", 10, "-q").code == 0
    assert llmc("report", "bundle", "--certificate", "c.json", "-o", "report.md").out == ""
    assert "compilations: 0 once it was ready" in (here / "report.md").read_text()


def test_a_hostile_name_is_text_alone(llmc: Llmc, bundle: Path) -> None:
    name = "a|b\n# <img src=x>[x](javascript:y)`c`*d*"
    edit_manifest(bundle, lambda document: document["model"].update(name=name))
    first, *rest = llmc("report", bundle).out.splitlines()
    assert first == r"### a\|b # \<img src=x\>\[x\](javascript:y)\`c\`\*d\* for fake"
    assert not any(line.startswith("#") for line in rest)


def test_what_does_not_belong_together_is_refused(llmc: Llmc, bundle: Path, toy: Path, here: Path) -> None:
    assert llmc("compile", toy, *COMPILE, "-o", "other", "-q").code == 0
    assert llmc("warmup", "other", "--certify", "c.json", "--requests", 10, "-q").code == 0
    assert "the certificate is for bundle sha256:" in llmc("report", bundle, "--certificate", "c.json").failed(5)
    (here / "done.json").write_text("{}")
    assert "field 'built' is missing" in llmc("report", bundle, "--compiled", "done.json").failed(2)
    assert "not a bundle" in llmc("report", "nowhere").failed(5)


def test_a_key_is_equal_for_an_equal_compile_alone(llmc: Llmc, tmp_path: Path, here: Path) -> None:
    def key(*more: object, model: Path | None = None) -> str:
        ran = llmc("compile", model or toy, *COMPILE, *more, "--emit", "key")
        assert ran.code == 0 and len(ran.out) == 65, ran
        return ran.out

    toy = write_toy(tmp_path / "toy")
    config = json.loads((toy / "config.json").read_text())
    first = key()
    assert key("--jobs", 3, "--cache-dir", here / "other") == first
    (toy / "config.json").write_text(json.dumps(config | {"_name_or_path": "elsewhere"}))
    assert key() == first
    assert len({first, key("--block-size", 8), key("--verify", "none"), key("--no-specialise")}) == 4
    assert key(model=write_toy(tmp_path / "another", seed=5)) != first
    found = llmc("compile", toy, *COMPILE, "--emit", "key", "--json").json
    assert found["components"]["code"].startswith("sha256:") and found["key"].endswith(first.strip())
    assert not (here / "bundle").exists()


def test_a_disaggregated_writes_no_single_outcome(llmc: Llmc, toy: Path) -> None:
    halves = ("--prefill-device", "fake", "--decode-device", "fake")
    said = llmc("compile", toy, *halves, *COMPILE[2:], "--result", "done.json", "-o", "bundle").failed(2)
    assert "--result" in said
