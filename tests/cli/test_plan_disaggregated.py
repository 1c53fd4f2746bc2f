"""`llmc plan --disaggregated`: whether two devices pay, from their bench files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmc.buckets.bucket import Bucket
from llmc.buckets.cost.bench import Bench, Measurement
from tests.cli.helpers import Llmc

FLAGS = ("--gb-per-s", 3, "--kv-bytes-per-token", "45KiB")
LENGTHS = ("--prompt-len", 512, "--output-len", 64)


def bench(path: Path, device: str, prompt: float, decode: float) -> str:
    """Seconds of a prompt token, and of a decode step."""
    measured = [Measurement(Bucket("prompt", 1, query, 0), prompt * query) for query in (64, 512)]
    measured += [Measurement(Bucket("decode", batch, 1, 1024), decode * (1 + batch / 8)) for batch in (1, 8)]
    Bench(device, tuple(measured)).save(path)
    return str(path)


@pytest.fixture
def benches(here: Path) -> tuple[str, ...]:
    fast, slow = bench(here / "x.json", "openvino", 3e-4, 0.02), bench(here / "y.json", "onnxruntime", 1e-3, 0.006)
    return "--prefill-bench", fast, "--decode-bench", slow


@pytest.mark.parametrize("name", ["--disaggregated", "disaggregated"])
def test_the_report_says_whether_it_pays_and_from_where_on(llmc: Llmc, benches: tuple[str, ...], name: str) -> None:
    ran = llmc("plan", name, *benches, *FLAGS, *LENGTHS)
    assert (ran.code, ran.err) == (0, "")
    assert "openvino alone" in ran.out and "onnxruntime alone" in ran.out
    assert "disaggregated: " in ran.out and ": it pays" in ran.out
    assert "1,024 tokens (47.2 MB) take 15.7 ms" in ran.out
    assert "pays for prompts of" in ran.out


def test_json_has_the_numbers(llmc: Llmc, benches: tuple[str, ...]) -> None:
    apart, shared = (
        json.loads(llmc("plan", "--disaggregated", *benches, *FLAGS, *LENGTHS, "--json", *more).out)
        for more in ([], ["--same-host", "--contention", 1.5])
    )
    assert apart["pays"] and apart["gain"] > shared["gain"]
    assert apart["disaggregated"]["requests"] == apart["prefill_alone"]["requests"] == 256
    assert apart["hand_over"]["bytes_per_token"] == 45 << 10
    assert shared["sharing"] == {"shared": True, "contention": 1.5}
    assert {one["output"] for one in apart["break_even"]} == {16, 64, 256, 1024, 4096}


def test_recorded_traffic_is_replayed_and_a_model_reports_its_keys_and_values(
    llmc: Llmc, benches: tuple[str, ...], here: Path
) -> None:
    (here / "requests.csv").write_text("time,prompt_tokens,output_tokens\n" + "".join(f"{i},100,8\n" for i in range(9)))
    config = {"model_type": "llama", "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
              "hidden_size": 576}  # fmt: skip
    (here / "config.json").write_text(json.dumps(config))
    given = ("--gb-per-s", 3, "--model", "config.json", "--traffic", "requests.csv")
    ran = llmc("plan", "--disaggregated", *benches, *given, "--json")
    found = json.loads(ran.out)
    assert found["disaggregated"]["requests"] == 9
    assert found["disaggregated"]["seconds"] == pytest.approx(8, abs=0.5)
    assert found["hand_over"]["bytes_per_token"] == 46_080


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((*FLAGS,), "give --traffic FILE, or --prompt-len and --output-len"),
        ((*FLAGS, "--prompt-len", 5), "give --traffic FILE, or"),
        ((*FLAGS, "--prompt-len", 9000, "--output-len", 5), "exceed --max-model-len 8192"),
        ((*FLAGS, *LENGTHS, "--arrival-rate", 3), "requests of --prompt-len all arrive at once"),
        ((*FLAGS, *LENGTHS, "--contention", 2), "add --same-host"),
        (("--gb-per-s", 3, *LENGTHS), "with either --model or --kv-bytes-per-token"),
        (("--gb-per-s", 0, "--kv-bytes-per-token", 1, *LENGTHS), "moves nothing"),
        (("--gb-per-s", 1, "--kv-bytes-per-token", 0, *LENGTHS), "0 bytes"),
    ],
)
def test_flags_that_do_not_fit_are_one_line(
    llmc: Llmc, benches: tuple[str, ...], flags: tuple[object, ...], words: str
) -> None:
    assert words in llmc("plan", "--disaggregated", *benches, *flags).failed(2)


def test_a_bench_without_decode_steps_is_refused(llmc: Llmc, benches: tuple[str, ...], here: Path) -> None:
    Bench("x", (Measurement(Bucket("prompt", 1, 64, 0), 0.1),)).save(here / "x.json")
    assert "no decode step was measured" in llmc("plan", "--disaggregated", *benches, *FLAGS, *LENGTHS).failed(2)
