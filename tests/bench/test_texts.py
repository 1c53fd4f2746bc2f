"""Texts a second of bundles that embed or score, on the fake device: rounds, padding, and what an interrupt leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import llmc
from llmc.bench.texts import measure
from llmc.errors import InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors.fake.executor import FakeEncoder
from llmc.testing.toy import write_toy_encoder

TEXTS = ["a" * 10, "b" * 16, "c" * 40, "d", "e" * 64]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("texts")
    for task in ("embed", "score"):
        model = write_toy_encoder(built / task, task)
        llmc.compile(model, built / f"{task}.llmc", device="fake", max_num_seqs=2, cache_dir=built / "store")
    return built


def bundle(folder: Path, task: str = "embed") -> Bundle:
    return Bundle.open(folder / f"{task}.llmc")


def interrupting(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The encoder is interrupted in its batch number `at`, warm-up included, and no other batch runs after it."""
    run, seen = FakeEncoder.encode, []

    def encode(self: FakeEncoder, inputs: Any, stream: int = 0) -> Any:
        seen.append(inputs)
        if len(seen) >= at:
            raise KeyboardInterrupt
        return run(self, inputs, stream)

    monkeypatch.setattr(FakeEncoder, "encode", encode)


def test_each_round_passes_all_texts_and_counts_what_is_padding(folder: Path) -> None:
    reported: list[tuple[int, int]] = []
    found = measure(
        bundle(folder), TEXTS, rounds=3, threads=1, report=lambda _, done, total: reported.append((done, total))
    )
    assert [(one.texts, one.tokens, one.padded, one.batches) for one in found.rounds] == [(5, 131, 176, 3)] * 3
    assert found.buckets == {(2, 64): 1, (2, 16): 1, (1, 16): 1}
    assert found.rounds[0].padding == pytest.approx(1 - 131 / found.rounds[0].padded)
    assert (found.unmeasured, found.partial, found.compilations) == ([], False, 0)
    assert found.best >= found.rate > 0
    assert reported == [(at, 9) for at in range(1, 10)], "6 buckets and 3 rounds"


def test_texts_of_a_reranker_are_scored_for_a_query(folder: Path) -> None:
    found = measure(bundle(folder, "score"), TEXTS[:4], query="xy", rounds=1, threads=1)
    assert found.rounds[0].tokens == sum(map(len, TEXTS[:4])) + 2 * 4


def test_an_interrupt_keeps_whole_rounds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupting(monkeypatch, 6 + 3 + 3 + 2)
    found = measure(bundle(folder), TEXTS, rounds=5, threads=1)
    assert (len(found.rounds), found.partial, found.unmeasured) == (2, False, ["3 of 5 rounds"])
    assert found.to_dict()["unmeasured"] == ["3 of 5 rounds"]


def test_an_interrupt_of_the_first_round_keeps_what_was_done_of_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupting(monkeypatch, 6 + 3)
    found = measure(bundle(folder), TEXTS, rounds=5, threads=1)
    assert (found.rounds[0].texts, found.rounds[0].batches, found.partial) == (4, 2, True)
    assert found.unmeasured == ["5 of 5 rounds"]
    assert found.to_dict()["partial"] is True


@pytest.mark.parametrize("at", [3, 7])
def test_an_interrupt_before_anything_was_measured_is_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    interrupting(monkeypatch, at)
    with pytest.raises(KeyboardInterrupt):
        measure(bundle(folder), TEXTS, threads=1)


def test_texts_that_are_too_long_are_refused_unless_they_are_cut(folder: Path) -> None:
    with pytest.raises(InputError, match="input 1 has 65 tokens"):
        measure(bundle(folder), ["a", "x" * 65], threads=1)
    assert measure(bundle(folder), ["a", "x" * 65], rounds=1, cut=-1, threads=1).rounds[0].tokens == 65
