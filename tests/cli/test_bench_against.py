"""`llmc bench BUNDLE --against PEERS`: a toy bundle and an engine that answers at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmc.bench.peers import catalogue, machine
from llmc.bench.peers.results import Comparison
from tests.cli.helpers import Llmc
from tests.tiers import default_cases, full

FAKE = str(Path(__file__).parents[1] / "bench" / "peers" / "fake_engine")


@pytest.fixture(autouse=True)
def fake_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = catalogue.Variant("huggingface", 32)
    peer = catalogue.Peer("fake", FAKE, ("numpy",), {"f32": variant})
    missing = catalogue.Peer("missing", FAKE, ("no-such-engine",), {"f32": variant})
    monkeypatch.setattr(catalogue, "PEERS", {"fake": peer, "missing": missing})
    monkeypatch.setitem(catalogue.PINS, "no-such-engine", "3")
    monkeypatch.setattr(machine, "READ_BYTES", 1 << 16)


@pytest.fixture
def bundle(llmc: Llmc, toy: Path, here: Path) -> Path:
    """At most 4 sequences of 64 tokens: room for a question in the toy's chat form."""
    made = llmc("compile", toy, "--device", "fake", "--max-model-len", 64, "--max-num-seqs", 4, "-o", "bundle", "-q")
    assert made.code == 0, made
    return here / "bundle"


@full
def test_a_bundle_is_compared(llmc: Llmc, bundle: Path, here: Path) -> None:
    asked = ("--only", "first-token,memory", "--rounds", 1, "--quick")
    ran = llmc("bench", bundle, "--against", "fake", *asked, "--json", "-o", "out.json", "--plot", "out.html")
    found = ran.json
    assert [c["name"] for c in found["contenders"]] == ["llmc", "fake f32"]
    first, memory = found["series"]
    assert len(first["rounds"]["llmc"]) == len(first["rounds"]["fake f32"]) == 3
    assert memory["missing"] == {"llmc": "the bundle runs 4 sequences at a time"}
    assert Comparison.load(here / "out.json").to_dict() == found
    assert (here / "out.html").read_text().startswith("<!doctype html>")


@full
def test_the_tables_say_who_is_faster_and_what_is_missing(llmc: Llmc, bundle: Path) -> None:
    ran = llmc("bench", bundle, "--against", "fake", "--only", "memory,first-token", "--rounds", 1, "--quick", "-q")
    assert ran.code == 0, ran
    assert "llmc over the best peer of as many bits or more (quality was not measured, so no class is known)" in ran.out
    assert "of its class" not in ran.out
    assert "llmc: the bundle runs 4 sequences at a time" in ran.out


def test_a_missing_peer_is_said_before_anything_is_made(llmc: Llmc, bundle: Path, tmp_path: Path) -> None:
    ran = llmc("bench", bundle, "--against", "fake,missing")
    assert "install with" in ran.failed(3) and "'no-such-engine==3'" in ran.failed(3)
    assert not (tmp_path / "cache" / "peers").exists()


@default_cases(3)
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--against", "vllm"), "unknown peer 'vllm'; known: fake, missing"),
        (("--against", "fake", "--only", "speed"), "unknown measurement 'speed'"),
        (("--against", "fake", "--only", "trace"), "needs a file of request lengths: --traffic FILE"),
        (("--against", "fake", "--scale", 2), "--scale needs --traffic"),
        (("--against", "fake", "--seconds", 1), "--seconds has no effect with --against"),
        (("--against", "fake", "--plot", "x.pdf"), "ends in .png or .html"),
        (("--against", "fake", "--peer-python", "nowhere"), "nowhere: no Python there"),
        (("--rounds", 3), "--rounds needs --against"),
        (("--quick",), "--quick needs --against"),
    ],
)
def test_flags_that_cannot_be_used_are_refused(flags: tuple[object, ...], said: str, llmc: Llmc, bundle: Path) -> None:
    assert said in llmc("bench", bundle, *flags).failed(2)


def test_buckets_are_still_timed_without_it(llmc: Llmc, bundle: Path) -> None:
    assert json.loads(llmc("bench", bundle, "--seconds", 0, "--json").out)["measurements"]


def test_another_checkpoint_is_refused(llmc: Llmc, bundle: Path, tmp_path: Path) -> None:
    from llmc.testing.toy import write_toy

    other = write_toy(tmp_path / "other", seed=5)
    said = llmc("bench", bundle, "--against", "fake", "--model", other).failed(2)
    assert "a comparison is of the same weights" in said
