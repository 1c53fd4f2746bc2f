"""A server over an LPU bundle: one sequence at a time, the others queue; parameters that an LPU has not are a 400."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.compiler import tiny
from tests.hyperdex import CASE, LpuHost, lpu
from tests.server.live import Live

__all__ = ["lpu"]
GREEDY = {"temperature": 0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}


@pytest.fixture
def server(lpu: LpuHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Live(lambda on_progress: lpu.open()) as live:
        yield live.ready()


def requested(**more: Any) -> dict[str, Any]:
    return {"prompt": [5, 6, 7], "max_tokens": 6, "return_token_ids": True, **GREEDY, **more}


def test_requests_queue_stream_and_are_refused_by_name(server: Live) -> None:
    with ThreadPoolExecutor(4) as callers:
        answers = list(callers.map(lambda n: server.ask("POST", "/v1/completions", requested(prompt=[5, n])), range(4)))
    assert [a.status for a in answers] == [200] * 4
    for number, answer in enumerate(answers):
        assert answer.json["choices"][0]["token_ids"] == tiny.greedy(CASE, [5, number], 6)
    streamed = server.ask("POST", "/v1/completions", requested(stream=True))
    assert [t for c in streamed.chunks for t in c["choices"][0]["token_ids"]] == tiny.greedy(CASE, [5, 6, 7], 6)
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    assert server.ask("POST", "/v1/chat/completions", chat).json["usage"]["completion_tokens"] == 3
    refused = {
        "seed": 1, "min_p": 0.1, "n": 2, "logprobs": 1, "ignore_eos": True, "presence_penalty": 0.5,
        "logit_bias": {"1": 1}, "allowed_token_ids": [1], "bad_words": ["a"],
    }  # fmt: skip
    for name, value in refused.items():
        given = {**requested(), "temperature": 1.0, name: value}
        error = server.ask("POST", "/v1/completions", given)
        assert (error.status, error.json["error"]["param"]) == (400, name), name
        assert f"{name} is not offered on this device" in error.json["error"]["message"]
    form = requested(structured_outputs={"regex": "a"})
    error = server.ask("POST", "/v1/completions", form)
    assert (error.status, error.json["error"]["param"]) == (400, "structured_outputs")
    longest = server.ask("POST", "/v1/completions", requested(prompt=[1] * 48))
    assert (
        longest.status == 400
        and "48 tokens; this model's maximum context length is 48 tokens" in longest.json["error"]["message"]
    )
    metrics = server.ask("GET", "/metrics").text
    assert 'bucket="1x1+48"' in metrics


def test_a_device_that_dies_fails_one_request_and_is_opened_again(
    lpu: LpuHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Live(lambda on_progress: lpu.open()) as server:
        server.ready()
        executor = server.server.state.served.engine.engine.core.executor  # type: ignore[union-attr]
        executor._hyperdex.kill()  # type: ignore[attr-defined]
        answer = server.ask("POST", "/v1/completions", requested())
        assert (answer.status, answer.json["choices"][0]["finish_reason"]) == (200, "error")
        again = server.ask("POST", "/v1/completions", requested())
        assert again.json["choices"][0]["token_ids"] == tiny.greedy(CASE, [5, 6, 7], 6)
        executor._hyperdex.kill()  # type: ignore[attr-defined]
        monkeypatch.setenv("FAKE_HYPERDEX", "kill:import")
        assert server.ask("POST", "/v1/completions", requested()).json["choices"][0]["finish_reason"] == "error"
        answer = server.ask("POST", "/v1/completions", requested())
        assert (answer.status, answer.json["error"]["code"]) == (503, "engine_dead")
        assert server.ask("GET", "/health").status == 503
