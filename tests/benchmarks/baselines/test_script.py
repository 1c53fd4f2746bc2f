"""benchmarks/compare.py: a toy bundle and an engine that answers at once."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import compare as script
import pytest
from baselines import catalogue, machine
from baselines.results import Comparison

from llmc.cli.main import main
from llmc.testing.toy import write_toy
from tests.cli.conftest import surround
from tests.cli.helpers import Ran
from tests.tiers import default_cases, full

FAKE = str(Path(__file__).parents[2] / "bench" / "fake_engine")
Script = Callable[..., Ran]


@pytest.fixture(autouse=True)
def fake_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = catalogue.Variant("huggingface", 32)
    baseline = catalogue.Baseline("fake", FAKE, ("numpy",), {"f32": variant})
    missing = catalogue.Baseline("missing", FAKE, ("no-such-engine",), {"f32": variant})
    monkeypatch.setattr(catalogue, "BASELINES", {"fake": baseline, "missing": missing})
    monkeypatch.setitem(catalogue.PINS, "no-such-engine", "3")
    monkeypatch.setattr(machine, "READ_BYTES", 1 << 16)


@pytest.fixture
def against(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Script:
    """Runs the program over a bundle of at most 4 sequences of 128 tokens, in a folder of its own."""
    surround(monkeypatch, tmp_path, tmp_path / "cache")
    toy = write_toy(tmp_path / "toy", max_position_embeddings=128)
    limits = ("--max-model-len", "128", "--max-num-seqs", "4")
    assert main(["compile", str(toy), "--device", "fake", *limits, "-o", "bundle", "-q"]) == 0

    def run(*words: object) -> Ran:
        capfd.readouterr()
        code = script.main(["bundle", *map(str, words)])
        return Ran(code, *capfd.readouterr())

    return run


@full
def test_a_bundle_is_compared(against: Script, tmp_path: Path) -> None:
    requested = ("--only", "first-token,memory", "--rounds", 1, "--quick")
    found = against("fake", *requested, "--json", "-o", "out.json", "--plot", "out.html").json
    assert [c["name"] for c in found["contenders"]] == ["llmc", "fake f32"]
    first, memory = found["series"]
    assert len(first["rounds"]["llmc"]) == len(first["rounds"]["fake f32"]) == 3
    assert memory["missing"] == {"llmc": "the bundle runs 4 sequences at a time"}
    assert Comparison.load(tmp_path / "out.json").to_dict() == found
    assert (tmp_path / "out.html").read_text().startswith("<!doctype html>")


@full
def test_the_tables_say_who_is_faster_and_what_is_missing(against: Script) -> None:
    ran = against("fake", "--only", "memory,first-token", "--rounds", 1, "--quick")
    assert ran.code == 0, ran
    assert (
        "llmc over the best baseline of as many bits or more (quality was not measured, so no class is known)"
        in ran.out
    )
    assert "of its class" not in ran.out
    assert "llmc: the bundle runs 4 sequences at a time" in ran.out


@default_cases(1)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_was_measured(
    against: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: int
) -> None:
    monkeypatch.setenv("FAKE_ENGINE", json.dumps({"interrupts": {"rows": 4, "signal": int(signum)}}))
    ran = against("fake", "--only", "decode,memory", "--quick", "-o", "out.json", "--json")
    found = Comparison.load(tmp_path / "out.json")
    assert ran.code == 130 and json.loads(ran.out) == found.to_dict()
    assert {name: len(values) for name, values in found.series[0].rounds.items()} == {"llmc": 2, "fake f32": 2}
    assert found.unfinished[0] == "decode step, batch 4 in every round (llmc 0 of 2, fake f32 0 of 2)"
    assert found.unfinished[1:3] == ["decode step, batch 8", "decode step, batch 16"]


def test_a_missing_baseline_is_said_before_anything_is_built(against: Script, tmp_path: Path) -> None:
    said = against("fake,missing").failed(3)
    assert "install with" in said and "'no-such-engine==3'" in said
    assert not (tmp_path / "cache" / "baselines").exists()


@default_cases(3)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("vllm",), "unknown baseline 'vllm'; known: fake, missing"),
        (("fake", "--only", "speed"), "unknown measurement 'speed'"),
        (("fake", "--only", "trace"), "needs a file of request lengths: --traffic FILE"),
        (("fake", "--scale", 2), "--scale 2 must be above 0, and needs --traffic"),
        (("fake", "--plot", "x.pdf"), "ends in .png or .html"),
        (("fake", "--baseline-python", "nowhere"), "nowhere: no Python there"),
    ],
)
def test_what_cannot_be_compared_is_refused(words: tuple[object, ...], said: str, against: Script) -> None:
    assert said in against(*words).failed(2)


def test_another_checkpoint_is_refused(against: Script, tmp_path: Path) -> None:
    other = write_toy(tmp_path / "other", seed=5)
    assert "a comparison is of the same weights" in against("fake", "--model", other).failed(2)
