"""The text in windows, what is kept of the reference's predictions, and the limits of formats."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.checkpoint.base import Checkpoint
from llmc.compiler.verification import probes as module
from llmc.compiler.verification.accuracy import check, compare, kl_divergence, least_equal
from llmc.compiler.verification.limits import EXACT, KV_CACHE, NUMBERS, WEIGHTS, AccuracyLimits, limits
from llmc.compiler.verification.probes import (
    LogitReference,
    TextWindow,
    load_windows,
    make_windows,
    parts_of,
    save_windows,
    shortened,
    text_digest,
)
from llmc.compiler.verification.texts import TEXTS
from llmc.errors import UnknownNameError, VerificationError
from llmc.testing.toy import VOCAB, write_toy
from tests.toy import reference


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(str(write_toy(tmp_path / "toy")))


def cut(checkpoint: Checkpoint, longest: int) -> list[TextWindow]:
    return make_windows(checkpoint, reference(Path(checkpoint.path)), longest, VOCAB)


def read(windows: list[TextWindow]) -> str:
    """Digest of windows all of whose positions were read."""
    return text_digest(windows, [w.positions.tolist() for w in windows])


# Windows


@pytest.mark.parametrize(("longest", "first"), [(2, 1), (3, 1), (9, 4), (17, 8), (64, 8), (4096, 8)])
def test_the_text_is_cut_into_windows_that_fit_the_plan(checkpoint: Checkpoint, longest: int, first: int) -> None:
    found = cut(checkpoint, longest)
    assert all(first < len(w.tokens) <= longest for w in found)
    assert all(w.positions.tolist() == list(range(first - 1, len(w.tokens))) for w in found)
    assert all(w.gaps.shape == (len(w.positions), VOCAB) for w in found)
    assert 400 < sum(len(w.tokens) for w in found) <= 512
    assert list(dict.fromkeys(w.part for w in found)) == list(TEXTS)


def test_a_part_is_one_window_where_the_plan_has_room(checkpoint: Checkpoint) -> None:
    assert [w.part for w in cut(checkpoint, 4096)] == list(TEXTS)


def test_a_large_vocabulary_keeps_fewer_positions_spread_over_the_text(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = cut(checkpoint, 64)
    monkeypatch.setattr(module, "GAPS", 100 * VOCAB)
    some = cut(checkpoint, 64)
    assert 60 < sum(len(w.positions) for w in some) <= 100 + len(some)
    assert all((np.diff(w.positions) == np.diff(some[0].positions)[0]).all() for w in some)
    assert [w.tokens.tolist() for w in some] == [w.tokens.tolist() for w in whole]
    assert read(some) != read(whole), "figures of other positions are other figures"
    at = int(some[0].positions[1])
    assert (some[0].gaps_after(at) == whole[0].gaps_after(at)).all()
    assert some[0].gaps_after(at + 1) is None and some[0].gaps_after(10**6) is None


@pytest.mark.parametrize(("layers", "text", "greedy"), [(30, 512, 66), (200, 476, 33), (900, 256, 33), (9000, 256, 33)])
def test_a_large_model_reads_less_text_and_the_manifest_says_so(
    checkpoint: Checkpoint, layers: int, text: int, greedy: int
) -> None:
    sized: Any = SimpleNamespace(
        config={"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": layers, "vocab_size": VOCAB},
        tokenizer_json=checkpoint.tokenizer_json,
    )
    assert {len(tokens) for _, tokens in parts_of(sized, VOCAB)} == {text // len(TEXTS)}
    wanted = {"text": (text, 512), "greedy": (greedy, 66)}
    assert shortened(sized) == {name: {"tokens": n, "of": of} for name, (n, of) in wanted.items() if n < of}


def test_without_a_tokenizer_the_ids_are_pseudo_random(tmp_path: Path) -> None:
    bare = open_checkpoint(str(write_toy(tmp_path / "bare", tokenizer=False)))
    found = cut(bare, 4096)
    assert {w.part for w in found} == {"random"} and len(found) == len(TEXTS)
    assert len({t for w in found for t in w.tokens.tolist()}) > 100
    assert read(found) == read(cut(bare, 4096))


def test_a_tokenizer_that_knows_nothing_of_the_text_is_not_requested(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmc.runtime.text.tokenizer.Tokenizer.encode", lambda self, text: [1])
    assert {w.part for w in cut(checkpoint, 4096)} == {"random"}


def test_windows_come_back_as_they_were_kept(checkpoint: Checkpoint) -> None:
    kept = cut(checkpoint, 30)
    with np.load(io.BytesIO(save_windows(kept)), allow_pickle=False) as arrays:
        found = load_windows(arrays)
    assert read(found) == read(kept)
    assert all((a.gaps == b.gaps).all() for a, b in zip(found, kept, strict=True))


def test_a_reference_that_gives_no_numbers_is_no_reference(checkpoint: Checkpoint) -> None:
    class Broken(LogitReference):
        def logits(self, tokens: Sequence[int], positions: Sequence[int]) -> np.ndarray:
            return np.full((len(positions), VOCAB), np.nan, np.float32)

        def continued(self, prompt: Sequence[int], count: int) -> tuple[list[int], np.ndarray]:
            raise NotImplementedError

    with pytest.raises(VerificationError, match="the reference model's logits contain NaN or infinity"):
        make_windows(checkpoint, Broken(), 64, VOCAB)


# Predictions


def gaps(logits: np.ndarray) -> np.ndarray:
    return module._gaps(logits)


def test_what_is_kept_reports_divergences_to_three_digits() -> None:
    random = np.random.default_rng(0)
    logits = random.normal(0, 3, (20, 5000)).astype(np.float32)
    same, equal = compare(gaps(logits), logits + np.float32(5))
    assert same.max() < 1e-7 and equal.all()
    other = logits + random.normal(0, 0.1, logits.shape).astype(np.float32)
    found, _ = compare(gaps(logits), other)
    assert found == pytest.approx([kl_divergence(a, b) for a, b in zip(logits, other, strict=True)], rel=5e-3)


def test_tokens_that_neither_can_produce_count_for_nothing() -> None:
    logits = np.array([[1.0, 0.0, -np.inf, -50.0]], np.float32)
    assert compare(gaps(logits), logits)[0] == pytest.approx([0], abs=1e-7)
    finite = np.array([[1.0, 0.0, -40.0, -50.0]], np.float32)
    assert compare(gaps(logits), finite)[0] == pytest.approx([0], abs=1e-7)
    (refused,), _ = compare(gaps(finite), np.array([[1.0, -np.inf, 0.0, 0.0]], np.float32))
    assert np.isinf(refused), "a token that the reference may produce and the bundle never"


def test_best_tokens_are_equal_within_rounding_only() -> None:
    reference_logits = np.array([[5.0, 4.999, 4.9]] * 3, np.float32)
    others = np.array([[5, 4, 4], [4, 5, 4], [4, 4, 5]], np.float32)
    assert compare(gaps(reference_logits), others)[1].tolist() == [True, True, False]


# Limits


def test_float32_must_be_equal_and_other_formats_may_cost_what_is_allowed() -> None:
    assert limits("none", "f32") == EXACT == AccuracyLimits(1e-5, 1.0, True, 1e-5, 1e-5, "exact")
    assert limits("int8", "f32") == AccuracyLimits(0.02, 0.85, False, 0.1, 0.3, "int8")
    order = [limits(*f).mean_kl for f in (("none", "f16"), ("none", "bf16"), ("int8", "f32"), ("int4", "f32"))]
    assert order == sorted(order) and len(set(order)) == 4
    assert limits("keep", "f32").mean_kl < limits("int8", "f32").mean_kl


def test_what_formats_may_cost_adds_up() -> None:
    both = limits("int8", "bf16", "u8")
    assert both.mean_kl == pytest.approx(0.02 + 0.01 + 0.005) and both.top1 == pytest.approx(1 - 0.15 - 0.08 - 0.04)
    assert both.quality == "int8 + bf16 + u8 KV cache" and not both.greedy_equal
    assert limits("none", "bf16", "bf16") == limits("none", "bf16"), "a cache in the model's own numbers"
    assert limits("none", "f32", "u8").quality == "u8 KV cache"


@pytest.mark.parametrize("formats", [("int3", "f32", "f32"), ("none", "f8", "f32"), ("none", "f32", "u2")])
def test_formats_without_a_limit_are_refused_by_name(formats: tuple[str, str, str]) -> None:
    with pytest.raises(UnknownNameError, match="known: "):
        limits(*formats)


def test_every_allowance_gives_its_reason() -> None:
    allowances = [a for table in (WEIGHTS, NUMBERS, KV_CACHE) for a in table.values() if a is not None]
    assert len(allowances) >= 6
    assert all(0 < a.mean_kl < 1 and 0 < a.differing < 1 and a.reason for a in allowances)


@pytest.mark.parametrize(
    ("figures", "passes"),
    [
        ({"mean_kl": 0.02, "top1": 0.85}, True),
        ({"mean_kl": 0.0201, "top1": 0.99}, False),
        ({"mean_kl": 0.001, "top1": 0.83}, True),
        ({"mean_kl": 0.001, "top1": 0.80}, False),
        ({"mean_kl": float("nan"), "top1": 0.99}, False),
        ({"mean_kl": float("inf"), "top1": 0.99}, False),
    ],
)
def test_both_figures_must_keep_their_limit(figures: dict[str, float], passes: bool) -> None:
    found = {"tokens": 475, "p99_kl": 0.1, **figures}
    if passes:
        check(found, limits("int8", "f32"))
        return
    with pytest.raises(VerificationError, match=r"over 475 tokens of text .* \(limit 0.02 for int8; p99 0.1\)"):
        check(found, limits("int8", "f32"))


def test_few_rows_may_differ_by_chance_and_none_where_all_must_be_equal() -> None:
    assert least_equal(0.85, 25) == pytest.approx(0.85 - 2 * (0.85 * 0.15 / 25) ** 0.5)
    assert least_equal(1.0, 25) == 1.0
