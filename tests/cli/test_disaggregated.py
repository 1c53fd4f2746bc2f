"""`--prefill-device X --decode-device Y`: one folder for two devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.bundle.disaggregated import FILE_NAME, Halves
from llmc.artifacts.bundle.manifest import read_manifest
from llmc.compiler.targets.fake import FakeTarget
from llmc.errors import ArtifactError
from llmc.runtime.bundle import Bundle
from tests.cli.helpers import Llmc
from tests.toy import greedy

PAIR = ("--prefill-device", "fake", "--decode-device", "fake:ragged", "--max-model-len", 32, "--max-num-seqs", 4)


@pytest.fixture
def disaggregated(llmc: Llmc, toy: Path, here: Path) -> Path:
    assert llmc("compile", toy, *PAIR, "-o", "disaggregated", "-q").code == 0
    return here / "disaggregated"


def test_a_folder_for_two_devices_answers_like_one(disaggregated: Path, llmc: Llmc, toy: Path) -> None:
    given = ("--prompt", "a river", "--ignore-eos", "--max-tokens", 6)
    said = json.loads(llmc("generate", disaggregated, *given, "--json").out)
    assert [said["token_ids"]] == greedy(toy, [said["prompt_token_ids"]], 6)
    assert [step["phase"] for step in said["buckets"]] == ["prompt", *["decode"] * 5]
    assert said["buckets"][0]["executable"] == "handed over" and said["timings"]["kv_transfer"]["tokens"] == 7


def test_neither_half_has_graphs_that_it_never_runs(disaggregated: Path) -> None:
    halves = Halves.read(disaggregated)
    assert halves is not None
    prefill, decode = (read_manifest(one) for one in (halves.prefill, halves.decode))
    assert (prefill.device, decode.device) == ("fake", "fake:ragged")
    assert len(prefill.plan["decode"]) == 1 == len(decode.plan["prompt"])
    assert len(prefill.plan["prompt"]) > 1


def test_what_is_requested_of_a_compile_is_said_of_each_half(llmc: Llmc, toy: Path) -> None:
    said = json.loads(llmc("compile", toy, *PAIR, "-o", "disaggregated", "--json").out)
    assert (said["prefill"]["native"], said["decode"]["native"]) == (said["prefill"]["built"], 1)
    assert said["disaggregated"] == "disaggregated" and said["variables"] == {}


def test_a_device_whose_own_runtime_hands_over_gets_one_bundle(
    llmc: Llmc, toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def own(self: FakeTarget, device: str) -> dict[str, str] | None:
        return {"NUM_GPU_DEVICES": device.partition(":")[2]} if device.startswith("gpu") else None

    monkeypatch.setattr(FakeTarget, "prefills_on", own, raising=False)
    ran = llmc("compile", toy, "--prefill-device", "gpu:2", "--decode-device", "fake", "-o", "one", "-q")
    assert ran.code == 0 and "by itself if NUM_GPU_DEVICES=2 is set" in ran.out
    assert Bundle.open("one").prefill is None
    assert llmc("compile", toy, "--prefill-device", "gpu:2", "--decode-device", "fake:ragged", "-o", "b").code == 0


@pytest.mark.parametrize(
    "flags",
    [
        ("--prefill-device", "fake"), ("--decode-device", "fake"), (*PAIR, "--device", "fake"), (*PAIR, "--dry-run"),
        (*PAIR, "--emit", "program"), ("--prefill-device", "x", "--decode-device", "fake"),
        (*PAIR, "--kernels", "llmc"),
    ],
)  # fmt: skip
def test_what_makes_no_disaggregated_is_refused(llmc: Llmc, toy: Path, flags: tuple[Any, ...]) -> None:
    ran = llmc("compile", toy, *flags, "-o", "disaggregated")
    assert ran.code == 2 and ran.err.startswith("llmc: error: ")
    assert not Path("disaggregated", FILE_NAME).exists()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"schema": 2, "prefill": "prefill", "decode": "decode"}', "\xff", '{"schema": 1, "prefill": 1}',
     '{"schema": 1, "prefill": "../prefill", "decode": "decode"}', '{"schema": 1, "prefill": "/x", "decode": "x"}'],
)  # fmt: skip
def test_a_folder_that_says_nothing_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(ArtifactError, match="not valid for this llmc"):
        Halves.read(tmp_path)


def test_the_prefill_half_alone_serves_others(disaggregated: Path, llmc: Llmc) -> None:
    assert Bundle.open(disaggregated).manifest.device == "fake:ragged"
    halves = Halves.read(disaggregated)
    assert halves is not None and Bundle.open(disaggregated).prefill == halves.prefill
