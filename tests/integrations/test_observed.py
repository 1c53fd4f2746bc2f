"""Recorded traffic as a server's steps: requests, lengths by interval, and logs of steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.errors import InputError
from llmc.integrations import bucket_rules
from llmc.integrations.base import GraphDemand, Setup
from llmc.integrations.configuration import setup_for
from llmc.integrations.evaluation import evaluate
from llmc.integrations.observed import TrafficSource, observe
from llmc.integrations.report import ranges
from llmc.integrations.tune import ends
from tests.integrations.fake import Fake

HISTOGRAM = """\
vllm:request_prompt_tokens_bucket{le="10"} 20
vllm:request_prompt_tokens_bucket{le="40"} 80
vllm:request_prompt_tokens_bucket{le="+Inf"} 80
vllm:request_prompt_tokens_sum 2000
vllm:request_prompt_tokens_count 80
vllm:request_generation_tokens_bucket{le="5"} 80
vllm:request_generation_tokens_bucket{le="+Inf"} 80
vllm:request_generation_tokens_sum 300
vllm:request_generation_tokens_count 80
"""
GRAPHS = """\
| Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |
|-----------------|---------------|--------------|--------------|-------|
| 3               | 4             | 1            | FULL         | 7     |
| 9               | 16            | 7            | PIECEWISE    | 2     |
"""


def test_requests_become_steps(fake: Fake, setup: Setup, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("time,prompt_tokens,output_tokens\n0,20,3\n0,70,3\n")
    found = observe(fake, setup, TrafficSource(str(tmp_path / "t.csv")))
    assert found.demands["tokens"] == {
        (20,): GraphDemand("tokens", (20,), 1, 20),
        (1,): GraphDemand("tokens", (1,), 2, 2),
    }
    assert found.counts["above_prompt"] == 1 and "left out" in found.notes[0] and found.ends == ()


def test_intervals_of_lengths_make_padding_a_range(fake: Fake, setup: Setup, tmp_path: Path) -> None:
    (tmp_path / "scrape.prom").write_text(HISTOGRAM)
    found = observe(fake, setup, TrafficSource(str(tmp_path / "scrape.prom")))
    assert len(found.ends) == 2
    lists = {"a": fake.default(setup)}
    one = evaluate(fake, setup, lists["a"], found.demands)
    each = ends(fake, setup, lists, found)
    assert len({one.worst, *(end.worst for end in each["a"])}) > 1
    said, _ = ranges([("a", one)], each)
    assert said.startswith("a: tokens padding ") and " by where lengths lie in their intervals" in said


def test_a_log_of_steps_is_taken_as_it_is(tmp_path: Path) -> None:
    vllm = bucket_rules("vllm")
    (tmp_path / "server.log").write_text(GRAPHS)
    found = observe(vllm, setup_for(vllm, {"max_model_len": 64}, {}), TrafficSource(str(tmp_path / "server.log")))
    assert found.demands == {
        "tokens": {(3,): GraphDemand("tokens", (3,), 7, 21), (9,): GraphDemand("tokens", (9,), 2, 18)}
    }
    assert found.facts == {"traffic": "server.log", "steps": 9} and found.requests == () and found.period is None


def test_steps_of_another_server_are_refused(tmp_path: Path) -> None:
    gaudi = bucket_rules("vllm-gaudi")
    (tmp_path / "server.log").write_text(GRAPHS)
    with pytest.raises(InputError, match=r"counts steps by tokens, and the graphs of vllm-gaudi are of prompt: batch"):
        observe(gaudi, setup_for(gaudi, {"max_model_len": 2048}, {}), TrafficSource(str(tmp_path / "server.log")))
