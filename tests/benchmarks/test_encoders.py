"""benchmarks/encoders.py without its baselines: engines in turns, what an interrupt keeps, and the arithmetic."""

from __future__ import annotations

import json
from typing import Any

import pytest


@pytest.fixture(scope="module")
def encoders(of: Any) -> Any:
    return of("encoders")


class Engine:
    """Takes these seconds, one after the other; then it is interrupted."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)

    def run(self) -> dict[str, Any]:
        if not self.seconds:
            raise KeyboardInterrupt
        return {"seconds": self.seconds.pop(0), "lengths": [4, 2, 2], "padded_tokens": 10}


def test_engines_take_turns_and_all_rounds_count(encoders: Any) -> None:
    rounds, whole = encoders.in_turns({"llmc f32": Engine(1, 3, 2), "baseline f32": Engine(2, 9, 8)}, 3)
    assert whole
    found = encoders.summary(rounds, 3, {}, ("f32",))
    assert found["sentences_per_s"] == {"llmc f32": 1.5, "baseline f32": 3 / 8}
    assert found["best_round"] == {"llmc f32": 3, "baseline f32": 1.5}
    assert (found["rounds"], found["ratio_f32"], found["ratio_f32_of_best_rounds"]) == (3, 3, 2)
    assert found["llmc_padding"] == pytest.approx(0.2)
    assert found["padding_to_the_longest"] == pytest.approx(1 - 8 / 12)


def test_an_interrupt_keeps_the_rounds_that_every_engine_has_finished(
    encoders: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds, whole = encoders.in_turns({"llmc f32": Engine(1, 3, 2), "baseline f32": Engine(2, 9)}, 5)
    assert not whole
    assert {name: [one["seconds"] for one in passes] for name, passes in rounds.items()} == {
        "llmc f32": [1, 3], "baseline f32": [2, 9]
    }  # fmt: skip
    assert "interrupted: 2 of 5 rounds" in capsys.readouterr().err
    found = {"threads": 2, **encoders.summary(rounds, 3, {"llmc f32": 1.0, "baseline f32": 1.0}, ("f32",))}
    encoders.show(found, ("f32",), True)
    assert json.loads(capsys.readouterr().out)["rounds"] == 2
    encoders.show(found, ("f32",), False)
    assert "3 sentences, 8 tokens (longest 4), 2 threads, 2 rounds" in capsys.readouterr().out


def test_an_interrupt_before_the_first_round_has_ended_is_one(encoders: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        encoders.in_turns({"llmc f32": Engine(1), "baseline f32": Engine()}, 5)
