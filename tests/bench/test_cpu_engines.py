"""The engines of `--device cpu` in turn: every measurement, and what an interrupt or a failure leaves."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmc.bench import cpu_engines
from llmc.bench.cpu_engines import MEMORY, PROMPT, START, Amount, Figures, decode, measure, record
from llmc.bench.worker import EngineError
from llmc.cli.output import sigterm_interrupts
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.targets.cpu import PLAIN, Measured
from llmc.testing.toy import write_toy

FAKE = Path(__file__).with_name("fake_engine.py")
AMOUNT = Amount(rounds=3, steps=2, first_tokens=1, answer=4)


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_engines, "ENGINE", FAKE)


def run(folder: Path, *models: str) -> tuple[Figures, list[tuple[str, int, int]]]:
    manifest, reported = SimpleNamespace(model={"vocab_size": 5}), []
    bundles: Any = {name: SimpleNamespace(path=Path(name), manifest=manifest) for name in models}
    found = measure(bundles, AMOUNT, 1, folder / "logs", lambda *said: reported.append(said))
    return found, reported


def test_every_measurement_is_built_of_every_bundle_and_reported(tmp_path: Path) -> None:
    found, reported = run(tmp_path, "a", "b")
    assert {title: len(figures["b"]) for title, figures in found.rounds.items()} == AMOUNT.wanted()
    assert found.median(decode(4), "a") == pytest.approx(8.0)
    assert found.median(PROMPT, "a") == pytest.approx(512.0)
    assert 0.005 < (found.median(START, "a") or 0) < 10 and (found.median(MEMORY, "b") or 0) > 1e6
    assert [done for _, done, _ in reported] == list(range(1, len(reported) + 1)) and reported[-1][2] == len(reported)
    assert [what for what, *_ in reported[:4]] == [f"decode step, batch 1: {name}" for name in "abba"]


def test_an_engine_that_fails_ends_it(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no such model"):
        run(tmp_path, "a", "does-not-open")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_was_measured_and_names_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: int
) -> None:
    monkeypatch.setenv("FAKE_ENGINE", json.dumps({"interrupts": {"rows": 4, "signal": int(signum)}}))
    with sigterm_interrupts():
        found, _ = run(tmp_path, "a", "b")
    assert [len(values) for values in found.rounds[decode(1)].values()] == [3, 3]
    assert found.unfinished == list(AMOUNT.wanted())[1:]
    assert found.median(decode(4), "a") is None


def test_an_interrupt_before_anything_was_measured_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_ENGINE", json.dumps({"interrupts": {"rows": 1, "signal": int(signal.SIGINT)}}))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "a")


def test_a_record_is_what_the_choice_reads(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_toy(tmp_path / "toy", max_position_embeddings=128)))
    names = [f"onnxruntime {kind}" for _, kind in cpu_engines.cases(checkpoint, ("onnxruntime",))]
    found, _ = run(tmp_path, *names)
    built = Measured.of(record(found, checkpoint, ("onnxruntime",)))
    assert built.threads == 1 and built.parameters > 0
    assert built.engines["onnxruntime"][PLAIN]["decode_ms"] == {1: 2.0, 4: 8.0, 8: 16.0, 16: 32.0}
    assert built.engines["onnxruntime"][PLAIN]["prefill_ms"] == {512: 512.0}
