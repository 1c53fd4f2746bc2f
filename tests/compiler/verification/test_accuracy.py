"""How far a bundle's predictions are from the reference's over a text, and what is refused for it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.artifacts.bundle.manifest import read_manifest
from llmc.artifacts.store.store import Store
from llmc.buckets.limits import Limits as PlanLimits
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline import verification as stage
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.compiler.stages import Stages
from llmc.compiler.targets import open_target
from llmc.compiler.targets.description import ReferenceModel
from llmc.compiler.targets.fake import FakeTarget
from llmc.compiler.verification.accuracy import surprises
from llmc.compiler.verification.limits import AccuracyLimits, VerificationPolicy, limits
from llmc.compiler.verification.probes import load_probes, load_windows
from llmc.compiler.verification.texts import TEXTS
from llmc.errors import VerificationError
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.fake.device import FakeProgram
from llmc.runtime.step import Step
from llmc.runtime.text.tokenizer import Tokenizer
from llmc.testing.toy import DECODE, tokenizer_json, toy_plan
from tests.devices import Replay, computing, use, watching
from tests.tiers import default_cases
from tests.toy import Toy, reference

LONGEST = 32
"""Tokens of a sequence of the toy's plan."""

KINDS: dict[str, dict[str, Any]] = {
    "static": {},
    "exact": {"specialise": False},
    "ragged": {"device": "fake:ragged"},
    "paged": {"device": "fake:paged=80"},
}


class AsInt8(VerificationPolicy):
    def limits(self, options: CompileOptions) -> AccuracyLimits:
        return limits("int8", "f32")


class Close(FakeTarget):
    """Limits of int8, for whatever is compiled."""

    @property
    def verification(self) -> VerificationPolicy:
        return AsInt8()


def rounded(logits: np.ndarray) -> np.ndarray:
    """Predictions that are a little off: to steps of 0.4, which is 0.02 nats or so."""
    return np.round(logits / 0.4) * 0.4


def coarse(program: FakeProgram, *given: Any) -> Any:
    logits, new = program.replay(*given)
    return rounded(logits), new


def windows(longest: int, tokenizer: Tokenizer) -> list[list[int]]:
    """The text as the docstrings tell: 102 tokens of each part, in windows of at most `longest`."""
    parts = [tokenizer.encode(text)[: 512 // 5] for text in TEXTS.values()]
    cut = [part[start : start + longest] for part in parts for start in range(0, len(part), longest)]
    return [tokens for tokens in cut if len(tokens) > 8]


def divergence(wanted: np.ndarray, got: np.ndarray) -> np.ndarray:
    """KL(wanted ‖ got) of rows of logits, by the book."""
    p, q = (np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(-1, keepdims=True) for x in (wanted, got))
    return (p * np.log(p / q)).sum(-1)


# The figures


def test_no_token_is_endlessly_surprising() -> None:
    gaps = np.array([[0, 65535]], np.uint16)
    built = surprises(gaps, np.array([[0, -np.inf]], np.float32), np.array([1]))
    assert built.tolist() == [[pytest.approx(32, abs=1e-3)], [pytest.approx(32, abs=1e-3)]]


@default_cases(2)
@pytest.mark.parametrize("kind", KINDS)
def test_the_figures_are_what_each_position_gives_by_itself(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    use(monkeypatch, target=Close, replay=coarse)
    found = toy.compile(**KINDS[kind]).verification["accuracy"]
    trusted, tokenizer = reference(toy.model), Tokenizer(tokenizer_json().encode())
    rows = [trusted.logits(tokens, range(7, len(tokens))) for tokens in windows(LONGEST, tokenizer)]
    wanted = np.concatenate(rows)
    kl = divergence(wanted, rounded(wanted))
    assert found["tokens"] == len(kl) > 300 and found["mean_kl"] > 1e-3
    assert found["mean_kl"] == pytest.approx(kl.mean(), rel=2e-3)
    assert found["p99_kl"] == pytest.approx(sorted(kl)[int(np.ceil(0.99 * len(kl))) - 1], rel=2e-2)
    assert found["max_kl"] == pytest.approx(kl.max(), rel=2e-2)
    assert found["top1"] == pytest.approx((rounded(wanted).argmax(-1) == wanted.argmax(-1)).mean(), abs=0.01)
    nexts = [tokens[8:] for tokens in windows(LONGEST, tokenizer)]
    for name, change in (("perplexity", rounded), ("reference_perplexity", np.asarray)):
        surprise = [
            -np.log(np.exp(row[token] - row.max()) / np.exp(row - row.max()).sum())
            for built, reported in zip(rows, nexts, strict=True)
            for row, token in zip(map(change, built.astype(np.float64)), reported, strict=False)
        ]
        assert found[name] == pytest.approx(np.exp(np.mean(surprise)), rel=2e-3)
    assert list(found["parts"]) == list(TEXTS)
    assert np.mean(list(found["parts"].values())) == pytest.approx(found["mean_kl"], rel=0.05)


def test_every_way_of_running_the_text_gives_comparable_figures(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, target=Close, replay=coarse)
    found = [toy.compile(**options).verification["accuracy"] for options in KINDS.values()]
    assert len({f["text"] for f in found}) == len({f["tokens"] for f in found}) == 1
    assert [f["mean_kl"] for f in found] == pytest.approx([found[0]["mean_kl"]] * len(found), rel=1e-3)


def test_an_exact_bundle_has_no_divergence_to_speak_of(toy: Toy) -> None:
    found = toy.compile().verification
    assert found["accuracy"]["max_kl"] < 1e-7 and found["accuracy"]["top1"] == 1.0
    assert read_manifest(toy.bundle).verification == found
    json.dumps(found, allow_nan=False)


def test_a_transformers_model_is_measured_as_one_would_by_hand(tmp_path: Path) -> None:
    from tests.compiler import tiny

    model, plan = tiny.write_model(tmp_path / "model", "qwen2"), tiny.tiny_plan()
    requested = CompileOptions("onnxruntime", quantize="int8").changed(prompt_dtype="int8")  # as decode steps are
    store = Store(tmp_path / "store")
    built = compile_bundle(str(model), tmp_path / "bundle", plan, requested, store, lambda _: None)
    bundle = Bundle.open(tmp_path / "bundle")
    executor = open_executor(bundle, threads=1)
    kl: list[float] = []
    for tokens in windows(48, bundle.tokenizer):
        wanted = tiny.logits("qwen2", tokens)[7:]
        got = [executor.run(step)[0].copy() for step in one_by_one(bundle, executor, tokens)][7:]
        kl += divergence(wanted, np.stack(got)).tolist()
    executor.close()
    found = built.verification["accuracy"]
    assert found["tokens"] == len(kl) and found["mean_kl"] > 1e-6
    assert found["mean_kl"] == pytest.approx(np.mean(kl), rel=0.1)


@pytest.mark.parametrize("longest", [LONGEST, 16])
def test_portable_executables_read_the_end_of_each_part(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, longest: int
) -> None:
    """They are replayed operator by operator, a hundred times slower than on their device: a plan of short sequences,
    whose text falls into many windows, takes them no more steps than one of long ones."""
    plan = toy_plan() if longest == LONGEST else toy_plan([(1, 16, 0)], [(1, 15)], PlanLimits(16, 1, 16, 8))
    steps: list[int] = []

    class Coarse(computing(coarse)):  # type: ignore[misc]
        def run(self, step: Step) -> Any:
            steps.append(step.query)
            return super().run(step)

    use(monkeypatch, target=Close, executor=Coarse, state="portable")
    toy.compile(plan, verify="none")
    bundle, stages = Bundle.open(toy.bundle), Stages(toy.store, open_checkpoint(toy.model), plan, lambda _: None)
    built = stage.run_parts(
        bundle, stages, stage.probes_stage(stages, open_target("fake")), ["accuracy"], lambda *_: None
    )
    found = built[0]["accuracy"]
    trusted, tokenizer = reference(toy.model), Tokenizer(tokenizer_json().encode())
    cut = windows(longest, tokenizer)
    count, kept = len(cut) // len(TEXTS), 16 // (longest - 7) + 1
    read = [tokens for at, tokens in enumerate(cut) if at % count >= count - kept]
    ends = [(tokens, range(max(7, longest - 16), longest)) for tokens in read]
    wanted = np.concatenate([trusted.logits(tokens, positions) for tokens, positions in ends])
    assert found["tokens"] == len(wanted) >= 16 * len(TEXTS)
    assert found["mean_kl"] == pytest.approx(divergence(wanted, rounded(wanted)).mean(), rel=2e-3)
    assert len(steps) < 100, "of 270 where the end of every window was read"


def one_by_one(bundle: Bundle, executor: Any, tokens: list[int]) -> Any:
    """Steps of one token each over slot 0; the first is a prompt."""
    from llmc.compiler.verification.steps import decode_step, prompt_steps

    yield from prompt_steps(bundle.plan, executor, 0, tokens[:1])
    for at in range(1, len(tokens)):
        yield decode_step(bundle.plan, executor, [tokens[at]], [at])


# What does not pass


def unprobed(toy: Toy) -> int:
    """The most frequent token of the text that no probe holds."""
    stages = Stages(toy.store, open_checkpoint(toy.model), toy.plan, lambda _: None)
    entry = stage.probes_stage(stages, FakeTarget())
    with np.load(stages.path(entry.outputs["probes"])) as arrays:
        probed = {int(t) for p in load_probes(arrays) for t in p.tokens}
    with np.load(stages.path(entry.outputs["text"])) as arrays:
        read = [int(t) for w in load_windows(arrays) for t in w.tokens]
    return max(set(read) - probed, key=read.count)


def damaged(token: int) -> Replay:
    """Replays with the embedding of one token lost."""

    def replay(program: FakeProgram, *given: Any) -> Any:
        embedding = program.embeddings[0].copy()
        embedding[token] = 0
        return replace(program, embeddings=(embedding,)).replay(*given)

    return replay


def test_what_no_probe_holds_is_found_by_the_text(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.compile(verify="none")
    use(monkeypatch, replay=damaged(unprobed(toy)))
    words = r"over \d+ tokens of text the bundle differs from the reference model by a mean KL of [\d.e-]+ nats "
    words += r"\(limit 1e-05 for exact; p99 [\d.]+\), top-1 agreement .*; the compiled graphs are wrong for this model"
    with pytest.raises(VerificationError, match=words) as caught:
        toy.compile(verify="all")
    assert caught.value.exit_code == 4
    assert read_manifest(toy.bundle).verification == {"mode": "none"}


def test_what_is_too_coarse_is_reported_with_a_way_out(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, target=Close)
    toy.compile(verify="none")
    token = unprobed(toy)
    use(monkeypatch, replay=damaged(token))
    with pytest.raises(VerificationError, match=re.escape("(limit 0.02 for int8; p99 ")) as caught:
        toy.compile()
    assert "too coarse for this model: choose a finer --quantize or --dtype" in str(caught.value)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_of_text_that_are_no_numbers_do_not_pass(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    toy.compile(verify="none")
    token = unprobed(toy)

    def replay(program: FakeProgram, token_ids: Any, past: Any, new: Any, cache: Any) -> Any:
        logits, vectors = program.replay(token_ids, past, new, cache)
        last = token_ids[np.arange(len(token_ids)), new - 1]
        return np.where((last == token)[:, None], np.float32(value), logits), vectors

    use(monkeypatch, replay=replay)
    with pytest.raises(VerificationError, match=r"by a mean KL of (nan|inf) nats"):
        toy.compile()


# Stages


def test_the_second_compile_needs_neither_the_reference_nor_the_device(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = toy.compile().verification

    def refuse(*_: object) -> Any:
        raise AssertionError("this was there already")

    monkeypatch.setattr(ReferenceModel, "open", refuse)
    assert toy.compile(toy_plan(decode=[*DECODE, (3, 24)])).verification["accuracy"] == first["accuracy"]
    use(monkeypatch, executor=watching(refuse))
    assert toy.compile().verification == first


def test_a_text_is_measured_the_same_after_whatever_was_measured_before(toy: Toy) -> None:
    """On a device whose cache depends on what a slot held before."""
    toy.compile(verify="none", specialise=False)
    stages = Stages(toy.store, open_checkpoint(toy.model), toy.plan, lambda _: None)
    entry = stage.probes_stage(stages, FakeTarget())
    first: list[stage.Part] = ["accuracy", "greedy", *toy.plan.buckets, "accuracy"]
    built = stage.run_parts(Bundle.open(toy.bundle), stages, entry, first, lambda *_: None)
    again = stage.run_parts(Bundle.open(toy.bundle), stages, entry, ["accuracy"], lambda *_: None)
    assert built[0] == built[-1] == again[0]
