"""`llmc embed` and `llmc score`, and what other commands say of bundles that generate nothing."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.cli.main import main
from llmc.testing.toy import write_toy_encoder
from tests.cli.conftest import surround
from tests.cli.helpers import Llmc


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundles `embed.llmc` and `score.llmc` and their checkpoints; commands write nothing there."""
    built = tmp_path_factory.mktemp("pooling")
    with pytest.MonkeyPatch.context() as patch:
        surround(patch, built, built / "cache")
        for task in ("embed", "score"):
            words = ("--device", "fake", "--max-num-seqs", "2", "-q", "-o", f"{task}.llmc")
            assert main(["compile", str(write_toy_encoder(built / task, task)), *words]) == 0
    return built


def test_vectors_are_printed_a_line_a_text_with_json_whole(llmc: Llmc, folder: Path) -> None:
    bundle = folder / "embed.llmc"
    ran = llmc("embed", bundle, "--text", "Paris", "--text", "river")
    assert ran.code == 0
    assert [line.split(":")[0] for line in ran.out.splitlines()] == [f"[{at}] 5 tokens, 8 numbers" for at in range(2)]
    assert "2 texts in" in ran.err and "10 tokens in 1 batches, padding 68.8%" in ran.err
    found = llmc("embed", bundle, "--text", "Paris", "--json", "--dimensions", 4).lines
    assert [(one["index"], one["prompt_tokens"], len(one["embedding"])) for one in found] == [(0, 5, 4)]


def test_texts_come_from_options_a_file_and_standard_input(
    llmc: Llmc, folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "lines.txt").write_text("b\nccc\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("dd\n"))
    found = llmc("embed", folder / "embed.llmc", "-", "-t", "aaaa", "--texts", "lines.txt", "--json").lines
    assert [one["prompt_tokens"] for one in found] == [4, 1, 3, 2]
    assert llmc("embed", folder / "embed.llmc", "-t", "aaaa", "-t", "b", "-o", "v.npy").out == ""
    written = np.load(here / "v.npy")
    assert written.dtype == np.float32
    assert np.allclose(written, [one["embedding"] for one in found[:2]], atol=1e-5)


def test_documents_are_ranked_best_first(llmc: Llmc, folder: Path) -> None:
    documents = ["-d", "Paris is.", "-d", "A river.", "-d", "x"]
    found = llmc("score", folder / "score.llmc", "--query", "where", *documents, "--json").lines
    assert sorted(one["index"] for one in found) == [0, 1, 2]
    assert [one["score"] for one in found] == sorted((one["score"] for one in found), reverse=True)
    ran = llmc("score", folder / "score.llmc", "--query", "where", *documents, "--top-n", 1)
    assert ran.out == f"{found[0]['score']:.4f}  [{found[0]['index']}] {found[0]['document']}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("embed", "embed.llmc"), "there is no text: give --text, --texts FILE or -"),
        (("embed", "embed.llmc", "a text"), "'a text': give texts with --text or --texts"),
        (("embed", "embed.llmc", "--texts", "nothere"), "cannot read the texts nothere: "),
        (("embed", "embed.llmc", "-t", "a", "--dimensions", "9"), "dimensions 9 must be in 1 … 8"),
        (("embed", "embed.llmc", "-t", "a", "--prompt-name", "query"), "the model has no prompt 'query'"),
        (("embed", "embed.llmc", "-t", "x" * 65), "input 0 has 65 tokens; this model takes at most 64"),
        (("embed", "score.llmc", "-t", "a"), "a bundle to score, not to embed; use llmc score"),
        (("score", "embed.llmc", "--query", "a", "-d", "b"), "a bundle to embed, not to score; use llmc embed"),
        (("score", "score.llmc", "--query", "a"), "there is no text"),
        (("score", "score.llmc", "--query", "a", "--documents", "nothere"), "cannot read the texts nothere: "),
        (("bench", "embed.llmc"), "a bundle to embed is timed over texts; give --texts FILE with one text a line"),
        (("bench", "embed.llmc", "--texts", "nothere"), "cannot read the texts nothere: "),
        (("bench", "embed.llmc", "--texts", "nothere", "--query", "a"), "a bundle to embed takes no --query"),
        (("bench", "score.llmc", "--texts", "nothere"), "a bundle to score needs --query TEXT"),
        (("bench", "embed.llmc", "--seconds", "1"), "--seconds is for models that generate; leave it out for a bundle"),
        (("warmup", "embed.llmc", "--certify", "c.json"), "--certify is for models that generate; leave it out for a"),
        (("warmup", "embed.llmc", "--traffic", "t.csv"), "--traffic is for models that generate; leave it out for a"),
        (("warmup", "score.llmc", "--graph-reserved-mem", "0.4"), "--graph-reserved-mem is for models that generate"),
        (("generate", "embed.llmc", "--prompt", "a"), "a bundle to embed, which generates nothing"),
    ],
)
def test_what_cannot_be_done_is_one_line(llmc: Llmc, folder: Path, words: tuple[str, ...], said: str) -> None:
    assert said in llmc(words[0], folder / words[1], *words[2:]).failed(2)


def test_texts_that_are_too_long_are_cut_where_that_is_requested(llmc: Llmc, folder: Path) -> None:
    found = llmc("embed", folder / "embed.llmc", "-t", "x" * 65, "--truncate", "--json").lines
    assert [one["prompt_tokens"] for one in found] == [64]
    words = ("--query", "x" * 40, "-d", "y" * 40, "--truncate", "--json")
    assert [one["prompt_tokens"] for one in llmc("score", folder / "score.llmc", *words).lines] == [64]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--device", "fake", "--emit", "all"), "--emit 'all' is unknown; choose program, lowered or key"),
        (("--device", "hpu"), "--device hpu cannot embed or score; choose one of cpu, onnxruntime"),
        (
            ("--device", "fake", "--require-native"),
            "--require-native: models that embed or score are compiled on each host",
        ),
        (("--device", "fake", "--sample-top-k", "4"), "--sample-top-k is for models that generate text; leave it out"),
        (("--device", "fake", "--quantize", "int4"), "--quantize int4 is not offered for embedding and scoring"),
        (("--max-model-len", "65"), "--max-model-len 65 is above the 64 tokens"),
        (("--task", "sing"), "unknown task 'sing'; known: embed, generate, score"),
    ],
)
def test_what_such_a_compile_does_not_take_is_one_line(
    llmc: Llmc, folder: Path, words: tuple[str, ...], said: str
) -> None:
    assert said in llmc("compile", folder / "embed", *words, "-o", "none.llmc").failed(2)


def test_a_compile_again_takes_all_from_the_store(llmc: Llmc, folder: Path) -> None:
    words = ("--device", "fake", "--max-num-seqs", 2, "-o", "again.llmc", "--json")
    found = llmc("compile", folder / "embed", *words).json
    assert (found["built"], found["reused"], found["specialised"]) == (6, 0, True)
    assert llmc("compile", folder / "embed", *words[:-2], "one.llmc", "--json").json["reused"] == 6
    said = llmc("compile", folder / "embed", *words[:-2], "two.llmc").err
    assert all(f"[{at}/6] executable: from the store" in said for at in range(1, 7))
    one = llmc("compile", folder / "embed", *words[:-2], "one.llmc", "--json", "--no-specialise").json
    assert (one["built"], one["reused"], one["specialised"]) == (1, 0, False)


def test_an_interrupted_compile_says_how_to_go_on(llmc: Llmc, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.compiler.targets.fake_encoder import FakeEncoderTarget

    def interrupt(self: FakeEncoderTarget, *given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeEncoderTarget, "make", interrupt)
    ran = llmc("compile", folder / "embed", "--device", "fake", "-o", "none.llmc")
    assert ran.code == 130
    assert ran.err.splitlines()[-1] == "llmc: interrupted; finished work is kept: run it again to continue"


def test_a_dry_run_says_what_is_missing_and_builds_nothing(llmc: Llmc, folder: Path) -> None:
    store = ("--cache-dir", "another", "--device", "fake")
    words = ("compile", folder / "embed", *store, "--max-num-seqs", 2)
    found = llmc(*words, "--dry-run", "--json").json
    assert (found["to_build"], found["cached"], found["estimated_seconds"]) == (6, 0, None)
    assert found["estimated_bytes"] > 0
    assert "time not measured here yet" in llmc(*words, "--dry-run").out
    llmc(*words[:-1], 1, "-o", "some.llmc")
    found = llmc(*words, "--dry-run", "--json").json
    assert (found["to_build"], found["cached"]) == (3, 3)
    assert [e["cached"] for e in found["executables"]] == [e["batch"] == 1 for e in found["executables"]]
    assert found["estimated_seconds"] is not None
    llmc(*words, "-o", "all.llmc")
    said = llmc(*words, "--dry-run").out
    assert "0 executables to build, 6 cached; about 0 s" in said
    assert "cannot" not in said
    every = llmc(*words, "--no-specialise", "--dry-run", "--json").json
    assert [(e["phase"], e["buckets"], e["cached"]) for e in every["executables"]] == [("any", 6, False)]


def test_a_bundle_is_verified_again(llmc: Llmc, folder: Path) -> None:
    ran = llmc("verify", folder / "embed.llmc", "--reference", folder / "embed")
    assert "files intact; against toy, a text at a time: 6 buckets, each twice" in ran.out
    found = llmc("verify", folder / "score.llmc", "--reference", folder / "score", "--all", "--json").json
    assert found["cosine"] > 0.99999 and found["leak"] <= 1e-5 and found["buckets"] == found["planned"]
    said = llmc("verify", folder / "score.llmc", "--reference", folder / "embed").failed(1)
    assert "is not the checkpoint that" in said


def test_files_and_plan_of_a_bundle_are_shown(llmc: Llmc, folder: Path, here: Path) -> None:
    assert "pooling.json" in llmc("cache", "show", folder / "embed.llmc").out
    assert llmc("plan", folder / "embed", "--max-num-seqs", 1, "-o", "plan.json").code == 0
    assert llmc("plan", "show", "plan.json").out.startswith("3 buckets to embed, texts of at most 64 tokens\n")
    assert llmc("plan", "show", "plan.json", "--json").json == json.loads((here / "plan.json").read_text())
    assert "--plot draws plans for text generation" in llmc("plan", "show", "plan.json", "--plot", "a.html").failed(2)
    said = llmc("plan", "evaluate", "plan.json", "--traffic", "t.csv").failed(2)
    assert said.startswith("plan.json: a plan to embed, which generates no text")


def test_recorded_texts_choose_the_buckets(llmc: Llmc, folder: Path, here: Path) -> None:
    (here / "texts.csv").write_text("prompt_tokens,output_tokens\n" + "9,0\n" * 30 + "40,0\n" * 3)
    words = ("--traffic", "texts.csv", "--max-num-seqs", 1, "--max-graphs", 3)
    ran = llmc("plan", folder / "embed", *words, "-o", "plan.json")
    assert ran.out.splitlines()[1:4] == ["  9 tokens: 1 texts", "  40 tokens: 1 texts", "  64 tokens: 1 texts"]
    assert "33 recorded texts, 390 tokens: padding 0.0% of what is computed" in ran.out
    assert "70.5% if all were as long as the longest" in ran.out
    found = llmc("compile", folder / "embed", "--plan", "plan.json", "--device", "fake", "-o", "planned.llmc", "--json")
    assert found.json["built"] == 3
    said = llmc("plan", folder / "embed", *words, "--max-padding", "5%").failed(2)
    assert "is planned by its limits, or by --traffic with --max-graphs; leave out --max-padding" in said
    assert "cannot read" in llmc("plan", folder / "embed", "--traffic", "nothere.csv").failed(2)


def test_a_warm_up_runs_every_bucket_twice_and_nothing_is_compiled(llmc: Llmc, folder: Path) -> None:
    found = llmc("warmup", folder / "embed.llmc", "--json").json
    assert list(found["phases"]) == ["embed"]
    counted = found["phases"]["embed"]
    assert (counted["buckets"], counted["warm"], counted["failed"]) == (6, 6, 0)
    assert counted["first_s"] > 0 and counted["replay_s"] > 0
    assert [tuple(one["bucket"]) for one in found["buckets"]] == [
        (2, 64, 0), (1, 64, 0), (2, 32, 0), (1, 32, 0), (2, 16, 0), (1, 16, 0)
    ], "the largest first"  # fmt: skip
    assert (found["compilations"], found["missing"], found["interrupted"]) == ([], [], False)
    ran = llmc("warmup", folder / "score.llmc")
    title, head, row, compilations, _ = ran.out.splitlines()
    assert title.endswith("score.llmc on fake")
    assert row.split()[:4] == ["score", "6", "6", "0"]
    assert (head.split()[0], compilations) == ("buckets", "compilations: 0")
    assert "[1/12] score[2x64+0]: 0." in ran.err
    llmc("compile", folder / "embed", "--device", "fake", "--no-specialise", "-o", "any.llmc")
    assert "any shape runs as it is: a text of each length warms it up" in llmc("warmup", "any.llmc").out


def failing(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], error: BaseException) -> None:
    """The fake encoder raises `error` for batches of this shape."""
    from llmc.runtime.executors.fake.executor import FakeEncoder

    run = FakeEncoder.encode

    def encode(self: FakeEncoder, inputs: Any, stream: int = 0) -> Any:
        if inputs["token_ids"].shape == shape:
            raise error
        return run(self, inputs, stream)

    monkeypatch.setattr(FakeEncoder, "encode", encode)


def test_a_bucket_that_does_not_run_is_named_and_the_others_run(
    llmc: Llmc, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, (1, 32), RuntimeError("no memory"))
    ran = llmc("warmup", folder / "embed.llmc")
    assert ran.code == 1
    assert ran.out.splitlines()[2].split()[:4] == ["embed", "6", "5", "1"]
    assert "1 of its buckets does not run here: embed[1x32+0]: RuntimeError: no memory" in ran.err


def test_an_interrupt_shows_what_was_warm(llmc: Llmc, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, (1, 32), KeyboardInterrupt())
    ran = llmc("warmup", folder / "embed.llmc", "--json")
    assert ran.code == 130
    assert [tuple(one["bucket"]) for one in json.loads(ran.out)["buckets"]] == [(2, 64, 0), (1, 64, 0), (2, 32, 0)]
    assert "not warmed up: 6 of 6 buckets" in ran.err


def test_programs_are_shown_traced_and_lowered(llmc: Llmc, folder: Path, here: Path) -> None:
    requested = ("compile", folder / "score", "--device", "fake", "--emit")
    assert json.loads(llmc(*requested, "program", "--json").json[0]["text"]) == {"labels": 1, "positions": 64}
    assert llmc(*requested, "lowered", "-o", "lowered.txt").out == ""
    name, text = (here / "lowered.txt").read_text().splitlines()
    assert (name, sorted(json.loads(text))) == ("// placements", ["embedding", "head"])


def test_texts_a_second_are_measured_and_written(llmc: Llmc, folder: Path, here: Path) -> None:
    (here / "lines.txt").write_text("a\n\nbbb\n" + "c" * 20 + "\n")
    requested = ("bench", folder / "embed.llmc", "--texts", "lines.txt", "--rounds", 2)
    found = llmc(*requested, "--json", "-o", "bench.json").json
    assert found == json.loads((here / "bench.json").read_text())
    assert (found["texts"], found["tokens"], len(found["rounds"])) == (3, 24, 2)
    assert found["padding"] == pytest.approx(1 - 24 / found["padded_tokens"])
    assert found["texts_per_s"] > 0 and "unmeasured" not in found
    ran = llmc(*requested)
    assert "3 texts, 24 tokens" in ran.out and "in the median of 2 rounds" in ran.out
    assert "[8/8] round: " in ran.err
    scored = llmc("bench", folder / "score.llmc", "--texts", "lines.txt", "--query", "xy", "--rounds", 1, "--json").json
    assert scored["tokens"] == 24 + 3 * 2
    (here / "empty.txt").write_text("\n")
    assert "no text found" in llmc("bench", folder / "embed.llmc", "--texts", "empty.txt").failed(2)


def test_an_interrupted_bench_shows_what_it_measured(
    llmc: Llmc, folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmc.runtime.pooling.pooler import Pooler

    embed, requested = Pooler.embed, []

    def signal_at_the_third(self: Pooler, *args: Any, **how: Any) -> Any:
        requested.append(args)
        if len(requested) == 3:
            signal.raise_signal(signal.SIGTERM)
        return embed(self, *args, **how)

    monkeypatch.setattr(Pooler, "embed", signal_at_the_third)
    (here / "lines.txt").write_text("a\nbbb\n")
    ran = llmc("bench", folder / "embed.llmc", "--texts", "lines.txt", "--json", "-q")
    assert ran.code == 130
    found = json.loads(ran.out)
    assert (len(found["rounds"]), found["unmeasured"]) == (2, ["3 of 5 rounds"])
    assert ran.err.splitlines() == ["llmc: not measured: 3 of 5 rounds", "llmc: interrupted"]
