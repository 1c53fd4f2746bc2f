"""A server that is ready after two buckets, and runs the others between requests."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from llmc.buckets.bucket import Bucket
from llmc.buckets.capture.order import warm_up_order
from llmc.buckets.plan import Plan
from llmc.runtime.step import Step
from llmc.server.events import Ready, WarmAside
from tests.devices import use, watching
from tests.server.live import Gate, Live, toy_bundle
from tests.timing import until


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One executable a bucket."""
    return toy_bundle(tmp_path_factory.mktemp("static"), specialise=True)


def bucket(step: Step) -> Bucket:
    return Bucket(step.phase, step.batch, step.query, step.context)


def plan_of(live: Live) -> Plan:
    assert live.server.state.served is not None
    return live.server.state.served.bundle.plan


def test_two_buckets_run_before_it_is_ready_and_the_others_after(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with Live(bundle, warm_up="aside") as live:
        assert live.wait(Ready).warmed == 2
        over = live.wait(WarmAside)
        plan = plan_of(live)
        smallest = [plan.prompt[0], plan.decode[0]]
        assert [bucket(step) for step in gate.steps[:2]] == smallest
        rest = [bucket(step) for step in gate.steps[2:]]
        assert rest == [one for one in warm_up_order(plan.buckets) if one not in smallest]
        assert (over.warmed, over.failed, over.compilations) == (len(rest), (), 0)


def test_the_hottest_of_the_others_comes_first(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with Live(bundle, warm_up="aside", uses=lambda plan: {plan.decode[-2]: 7}) as live:
        live.wait(WarmAside)
        assert bucket(gate.steps[2]) == plan_of(live).decode[-2]


def test_a_request_waits_for_one_bucket_at_most(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    gate.let(0)
    gate.hold()
    gate.let(2)
    with Live(bundle, warm_up="aside") as live:
        live.ready()
        gate.wait(3)
        call = live.call(max_tokens=2)
        until(lambda: live.stats.waiting + live.server.state.served.engine.in_flight > 0)  # type: ignore[union-attr]
        gate.let(1)  # the bucket that was running
        gate.wait(4)
        gate.let(2)  # a prompt and a decode step
        assert call.answer.status == 200
        steps = [bucket(step).phase for step in gate.steps[3:5]]
        assert steps == ["prompt", "decode"]
        assert int(gate.steps[4].past_lengths[0]) == 4, "the request's own step, after its prompt"
        gate.let()
        live.wait(WarmAside)


def test_ready_reports_how_far_the_rest_is(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    gate.hold()
    gate.let(5)
    with Live(bundle, warm_up="aside") as live:
        live.ready()
        gate.wait(6)
        at = live.get("/ready")
        total = len(plan_of(live).buckets) - 2
        assert at.status == 200
        assert (at.json["status"], at.json["warming"]["done"], at.json["warming"]["total"]) == ("ready", 3, total)
        assert at.json["warming"]["eta_s"] >= 0
        gate.let()
        live.wait(WarmAside)
        assert live.get("/ready").json == {"status": "ready", "phase": "ready"}


def test_a_bucket_that_fails_aside_is_named_and_the_server_serves(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(step: Step) -> None:
        if step.phase == "prompt" and step.batch > 1:
            raise MemoryError("no room")

    use(monkeypatch, executor=watching(broken))
    with Live(bundle, warm_up="aside") as live:
        over = live.wait(WarmAside)
        wide = [str(one) for one in plan_of(live).prompt if one.batch > 1]
        assert sorted(over.failed) == sorted(wide)
        assert all(any(name in text and "no room" in text for text in caplog.messages) for name in wide)
        assert live.complete().status == 200


def test_answers_are_those_of_a_warm_server_whatever_ran_in_its_slots(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Live(bundle) as live:
        live.ready()
        wanted = live.complete(prompt="abcdefgh").json["choices"][0]["text"]
    gate = Gate(monkeypatch)
    gate.hold()
    gate.let(2)
    with Live(bundle, warm_up="aside") as live:
        live.ready()
        for _ in range(3):
            call = live.call(prompt="abcdefgh")
            while not call.over:
                gate.let(1)
                time.sleep(0.001)
            assert call.answer.json["choices"][0]["text"] == wanted
        gate.let()
        live.wait(WarmAside)
        assert live.complete(prompt="abcdefgh").json["choices"][0]["text"] == wanted


def test_a_stop_does_not_wait_for_the_rest(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    gate.hold()
    gate.let(3)
    live = Live(bundle, warm_up="aside")
    with live:
        live.ready()
        gate.wait(4)
        live.server.stop()
        gate.let(1)
    assert len(gate.steps) <= 5
