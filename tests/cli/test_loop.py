"""`llmc loop`: its flags, and what it tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.helpers import Llmc


@pytest.fixture
def recording(here: Path) -> Path:
    lines = [json.dumps({"time": float(at), "prompt_tokens": 5, "output_tokens": 3}) for at in range(40)]
    path = here / "traffic.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_one_round_without_a_server_makes_a_bundle_and_a_link(
    llmc: Llmc, bundle: Path, toy: Path, recording: Path, here: Path
) -> None:
    flags = ("--bundle", bundle, "--traffic", recording, "--model", toy, "--once", "--min-gain", 0)
    planned = json.loads(llmc("loop", *flags, "--dry-run", "--json").out)
    assert (planned["outcome"], planned["requests"]) == ("planned", 40)
    said = llmc("loop", *flags).out
    assert said.startswith("40 requests; a plan of ") and said.rstrip().endswith("is ready")
    assert (here / "loop.llmc" / "current" / "manifest.json").exists()


@pytest.mark.parametrize(("flags", "said"), [
    ((), "name the SERVER, or a recording of its traffic: --traffic FILE"),
    (("localhost:8000",), "SERVER 'localhost:8000' is not a URL"),
    (("http://localhost:8000",), "LLMC_ADMIN_TOKEN is not set"),
    (("http://localhost:8000", "--bundle", "b"), "--bundle cannot be combined with SERVER"),
    (("--traffic", "t", "--every", "0"), "--every 0 must be above 0"),
    (("--traffic", "t", "--every", "often"), "--every 'often' is not a time"),
    (("--traffic", "t", "--budget", "much"), "--budget 'much' is not a time"),
    (("--traffic", "t", "--min-gain", "some"), "--min-gain 'some' is not a fraction"),
])  # fmt: skip
def test_bad_flags_are_named(llmc: Llmc, flags: tuple[Any, ...], said: str) -> None:
    assert said in llmc("loop", *flags).failed(2)


def test_a_round_that_fails_is_an_exit_code(llmc: Llmc, bundle: Path, here: Path) -> None:
    found = llmc("loop", "--bundle", bundle, "--traffic", "nowhere.jsonl", "--once")
    assert found.code == 1
    assert "failed to record" in found.out
