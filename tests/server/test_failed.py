"""What a client gets of a sequence that failed, and the others of theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.testing.toy import BYTES
from tests.damage import spoil
from tests.server.live import Live


@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_that_fails_ends_alone(bundle: Path, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    spoil(monkeypatch, BYTES.index("~"))
    with Live(bundle) as live:
        live.ready()
        alone = live.complete().json["choices"][0]["text"]
        answer = live.complete(prompt=["ab~", "abcd"], stream=stream)
        assert answer.status == 200
        texts, reasons = ["", ""], ["", ""]
        for part in answer.chunks if stream else [answer.json]:
            for choice in part["choices"]:
                texts[choice["index"]] += choice["text"]
                reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
        assert (texts, reasons) == (["", alone], ["error", "length"])
        assert "nan" not in answer.text, "what went wrong stands in the log"
        assert live.complete().json["choices"][0]["text"] == alone
        assert live.get("/health").status == 200
        text = live.get("/metrics").text
        (line,) = (x for x in text.splitlines() if x.startswith("llmc:request_success_total{") and '"error"' in x)
        assert float(line.rpartition(" ")[2]) == 1
        assert live.gauge("num_requests_running") == 0 and live.gauge("kv_cache_usage_perc") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_in_a_chat(bundle: Path, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    spoil(monkeypatch, BYTES.index("~"))
    with Live(bundle) as live:
        live.ready()
        body = {"messages": [{"role": "user", "content": "~"}], "max_tokens": 3, "temperature": 0, "stream": stream}
        answer = live.ask("POST", "/v1/chat/completions", body)
        assert answer.status == 200
        last = [c for part in (answer.chunks if stream else [answer.json]) for c in part["choices"]][-1]
        assert (last["index"], last["finish_reason"]) == (0, "error")
