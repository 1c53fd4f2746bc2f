"""The long sequence that buckets are compared over: never one text repeated, and where a model begins to differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.verification.probes import (
    BEYOND,
    FARTHEST,
    LEAST_LONG,
    LONGEST,
    LogitReference,
    Probe,
    make_probes,
    turns_of,
)
from llmc.compiler.verification.texts import PASSAGES, long_text
from llmc.compiler.verification.toy_reference import ToyReference
from llmc.runtime.text.tokenizer import Tokenizer
from llmc.testing.toy import tokenizer_json, write_toy

STRETCH = 300
"""Characters; the longest stretch that may come twice is a passage."""
SMALL = {"hidden_size": 8, "num_hidden_layers": 1}
MEDIUM = {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192}
LARGE = {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336}


class Counting(LogitReference):
    """A reference that answers nothing, and notes what it is asked for."""

    def logits(self, tokens: Sequence[int], positions: Sequence[int]) -> Any:
        return np.zeros((len(positions), 2), np.float32)

    def continued(self, prompt: Sequence[int], count: int) -> Any:
        return [0] * count, np.zeros((count, 2), np.float32)


def probes_of(folder: Path, longest: int, **config: object) -> list[Probe]:
    """Those for a model of that configuration, where a plan allows `longest` tokens."""
    checkpoint = open_checkpoint(write_toy(folder / "toy"))
    wrapped: Any = SimpleNamespace(config={**checkpoint.config, **config}, tokenizer_json=checkpoint.tokenizer_json)
    return make_probes(wrapped, Counting(), longest, 2, longest - 1)


def long_probe(folder: Path, longest: int, **config: object) -> Probe:
    """The long sequence."""
    return probes_of(folder, longest, **config)[-1]


def test_no_stretch_of_the_long_text_comes_twice() -> None:
    encode = Tokenizer(tokenizer_json().encode()).encode
    text = bytes(long_text(encode, 40_000))  # a token is a byte here, some six rounds of all passages
    headed = [text[at : at + STRETCH] for at in range(0, len(text) - STRETCH, 50)]
    length = max(len(passage.encode()) for passage in PASSAGES) + 8
    whole = [text[at : at + 2 * length] for at in range(0, len(text) - 2 * length, 10)]
    assert len(set(whole)) == len(whole), "no two stretches longer than a passage are equal"
    assert len(headed) > 500


def test_texts_are_in_many_scripts_and_kinds_of_code() -> None:
    together = "".join(PASSAGES)
    assert all(any(low <= char <= high for char in together) for low, high in (
        ("a", "z"), ("а", "я"), ("α", "ω"), ("ء", "ي"), ("अ", "ह"), ("一", "鿿"), ("ぁ", "ん"), ("가", "힣"),
    ))  # fmt: skip
    assert all(word in together for word in ("def ", "#include", "SELECT", "fn ", "function", '{"'))
    assert len(set(PASSAGES)) == len(PASSAGES)


@pytest.mark.parametrize("longest", [10, 300, 2048, 5000])
def test_the_end_of_what_a_plan_allows_is_compared(tmp_path: Path, longest: int) -> None:
    probe = long_probe(tmp_path, longest, **SMALL)
    assert len(probe.tokens) == longest - 1
    assert {longest - 3, longest - 2} <= set(probe.positions.tolist())
    assert set(range(127, longest - 1, 128 * -(-longest // 2048))) <= set(probe.positions.tolist()) or longest > 2048


@pytest.mark.parametrize(
    ("config", "turn"),
    [
        ({"sliding_window": 4096}, 4096),
        ({"rope_parameters": {"rope_type": "llama3", "original_max_position_embeddings": 3000}}, 3000),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 300}}, 300),
    ],
)
def test_a_model_is_compared_before_at_and_beyond_its_turns(tmp_path: Path, config: dict[str, Any], turn: int) -> None:
    """Also where it is too large to be run much farther than that."""
    assert turns_of(config) == [turn]
    probe = long_probe(tmp_path, 100_000, **LARGE, **config)
    assert len(probe.tokens) == max(LEAST_LONG, turn + BEYOND)
    assert {turn - 1, turn, turn + 1} <= set(probe.positions.tolist())


def test_the_ends_of_buckets_are_compared_as_a_prompts_and_as_a_pasts(tmp_path: Path) -> None:
    """The last token of a prompt that fills one, and the token that continues as many."""
    positions = set(long_probe(tmp_path, 1000, **SMALL).positions.tolist())
    ends = {8, 16, 32, 64, 128, 256, 384, 512, 640, 768, 896}
    assert ends | {end - 1 for end in ends} <= positions


@pytest.mark.parametrize(("config", "tokens"), [(SMALL, FARTHEST), (MEDIUM, LONGEST), (LARGE, LEAST_LONG)])
def test_how_far_it_goes_is_what_the_reference_can_do(tmp_path: Path, config: dict[str, Any], tokens: int) -> None:
    assert len(long_probe(tmp_path, 100_000, **config).tokens) == tokens


@pytest.mark.parametrize(("config", "counts"), [(SMALL, [6, 8, 10, 12, 14, 16]), (MEDIUM, [3, 4, 5, 6, 7, 8])])
def test_prompts_are_continued_raggedly_and_by_fewer_tokens_of_a_large_model(
    tmp_path: Path, config: dict[str, Any], counts: list[int]
) -> None:
    assert [len(probe.continuation) for probe in probes_of(tmp_path, 300, **config)[:-1]] == counts


def test_a_continuations_logits_are_those_that_the_reference_gives_of_the_whole(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_toy(tmp_path / "toy"))
    reference = ToyReference(checkpoint)
    for probe in make_probes(checkpoint, reference, 100, int(checkpoint.config["vocab_size"]), 100):
        wanted = reference.logits(probe.tokens.tolist(), probe.positions.tolist())
        np.testing.assert_array_equal(probe.logits, wanted)
        assert probe.continuation == wanted[: len(probe.continuation)].argmax(-1).tolist()


def test_nothing_turns_without_a_window_or_scaling() -> None:
    assert turns_of({"sliding_window": None, "rope_parameters": {"rope_type": "default"}}) == turns_of({}) == []
    assert turns_of({"sliding_window": 4096, "use_sliding_window": False}) == []
    assert turns_of({"sliding_window": FARTHEST}) == [], "too far to be worth the way"
