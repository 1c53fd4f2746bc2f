"""More requests than the server can take: those that fit run and end, the others are refused at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.live import Gate, Live, completion
from tests.server.served import Served
from tests.server.stub_engine import refusal
from tests.tiers import default_cases
from tests.timing import until

SLOTS = 4


def test_of_fifty_requests_at_once_the_slots_and_the_queue_take_theirs(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with Live(bundle, max_queued_requests=8) as live:
        live.ready()
        gate.hold()
        ran = len(gate.steps)
        calls = [live.call() for _ in range(50)]
        until(lambda: sum(c.over for c in calls) == 50 - SLOTS - 8)
        assert len(gate.steps) == ran + 1  # the first one, which has not ended: nobody was refused after a step
        refused = [c.answer for c in calls if c.over]
        assert {r.status for r in refused} == {503}
        assert all(int(r.headers["retry-after"]) >= 1 for r in refused)
        assert "queue is full" in refused[0].json["error"]["message"]
        gate.let()
        admitted = [c.answer for c in calls if c.answer.status != 503]
        assert len(admitted) == SLOTS + 8
        assert {a.status for a in admitted} == {200}
        assert {a.json["usage"]["completion_tokens"] for a in admitted} == {4}
        assert live.complete().status == 200
        until(lambda: live.stats.running == 0)
        assert (live.gauge("num_requests_running"), live.gauge("num_requests_waiting")) == (0, 0)


def test_a_refusal_does_not_wait_for_the_step_that_runs(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with Live(bundle, max_queued_requests=0) as live:
        live.ready()
        gate.hold()
        ran = len(gate.steps)
        calls = [live.call() for _ in range(SLOTS)]
        assert live.server.state.served is not None
        engine = live.server.state.served.engine
        until(lambda: engine.in_flight == SLOTS)
        gate.wait(ran + 1)
        assert live.complete().status == 503
        assert len(gate.steps) == ran + 1, "the step that runs has not ended"
        gate.let()
        assert {c.answer.status for c in calls} == {200}


def test_a_stream_is_refused_before_it_begins(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with Live(bundle, max_queued_requests=0) as live:
        live.ready()
        gate.hold()
        calls = [live.call(stream=True) for _ in range(SLOTS)]
        assert live.server.state.served is not None
        engine = live.server.state.served.engine
        until(lambda: engine.in_flight == SLOTS)
        refused = live.complete(stream=True)
        assert (refused.status, refused.headers["content-type"]) == (503, "application/json")
        gate.let()
        assert {c.answer.status for c in calls} == {200}


@default_cases(1)
def test_whoever_refuses_says_when_to_come_back_and_health_waits_for_nobody(served: Served) -> None:
    """More than the slots and the queues of two servers take: 4 answers each keep a fast host busy, too."""
    requested = completion(prompt="a", max_tokens=20, n=4, temperature=1.0)
    with ThreadPoolExecutor(200) as pool:
        calls = [pool.submit(served.complete, **requested) for _ in range(200)]
        until(lambda: any(call.done() for call in calls))
        assert served.get("/health").json()["phase"] == "ready"
        answers = [call.result() for call in calls]
    refused = [answer for answer in answers if answer.status_code != 200]
    assert 0 < len(refused) < len(answers)
    for answer in refused:
        assert refusal(answer, answer.status_code)["code"] in ("overloaded", "too_many_requests")
        assert answer.status_code in (503, 429) and int(answer.headers["retry-after"]) >= 1
