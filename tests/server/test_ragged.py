"""A server over an executor that takes ragged steps from a pool of tokens, with drafts, and its limits."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llmc.runtime.startup.opening import EngineOptions
from tests.server.live import Live
from tests.toy import Toy

DRAFTS = EngineOptions(speculative_config={"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1})


@pytest.fixture(scope="module")
def paged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 sequences of 32 tokens, over 24 tokens of cache."""
    toy = Toy.make(tmp_path_factory.mktemp("paged"))
    toy.compile(device="fake:paged=24", verify="none")
    return toy.bundle


def counted(server: Live) -> dict[str, float]:
    text = server.ask("GET", "/metrics").text
    return {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}


def test_answers_are_the_same_with_drafts_and_metrics_count_them(paged: Path) -> None:
    requested = {"model": "toy", "prompt": [7, 8], "max_tokens": 20, "temperature": 0, "logit_bias": {"7": 40, "8": 40}}
    with Live(paged) as server:
        server.ready()
        plain = server.ask("POST", "/v1/completions", requested).json
    with Live(paged, options=DRAFTS) as server:
        server.ready()
        fast = server.ask("POST", "/v1/completions", requested).json
        found = counted(server)
    assert fast["choices"] == plain["choices"] and fast["usage"] == plain["usage"]
    assert fast["usage"]["completion_tokens"] == 20 == found["llmc:generation_tokens_total"]
    accepted, drafted = (found[f"llmc:spec_decode_num_{name}_tokens_total"] for name in ("accepted", "draft"))
    assert 0 < found["llmc:spec_decode_num_drafts_total"] <= drafted
    assert 8 < accepted <= drafted
    assert found["llmc:iteration_tokens_total_count"] == 20 - accepted


def test_a_prompt_beyond_the_cache_is_the_callers_mistake(paged: Path) -> None:
    with Live(paged) as server:
        server.ready()
        answer = server.ask("POST", "/v1/completions", {"model": "toy", "prompt": [1] * 25, "max_tokens": 1})
        assert answer.status == 400
        assert answer.json["error"]["message"].startswith("the prompt has 25 tokens; the KV cache holds 24: raise")
        fits = server.ask(
            "POST", "/v1/completions", {"model": "toy", "prompt": [1] * 24, "max_tokens": 9, "ignore_eos": True}
        ).json
        assert (fits["usage"]["completion_tokens"], fits["choices"][0]["finish_reason"]) == (1, "length")
