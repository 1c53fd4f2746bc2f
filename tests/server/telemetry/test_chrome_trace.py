"""A trace that Perfetto opens: whole events, parts inside their steps, tracks that never go back."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from llmc.errors import InputError
from llmc.runtime.engine.observer import Observers
from llmc.server.telemetry.chrome_trace import ChromeTrace
from tests.server.telemetry.samples import Kept, engine, run, step, summary, toy_bundle

Events = list[dict[str, Any]]


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def read(path: Path) -> Events:
    events: Events = json.loads(path.read_text())
    return events


def slices(events: Events) -> Events:
    return [event for event in events if event["ph"] == "X"]


def track_of(event: dict[str, Any]) -> str:
    """The request's track; Perfetto shows only those of a process, and merges those of one name."""
    return event.get("id2", {}).get("local", "")


def of(events: Events, request_id: str) -> Events:
    """The events of a request."""
    tracks = [track_of(e) for e in events if e["ph"] == "b" and e.get("args", {}).get("id") == request_id]
    return [e for e in events if track_of(e) in tracks]


def check(events: Events) -> None:
    """Slices of a thread nest, async slices end in the order they began, times of a track never go back."""
    last: dict[Any, float] = defaultdict(float)
    open_slices: list[float] = []
    open_names: dict[str, list[str]] = defaultdict(list)
    for event in events:
        if event["ph"] == "M":
            continue
        track = (event["ph"] == "C", event["tid"], track_of(event))
        assert event["ts"] >= last[track], event
        last[track] = event["ts"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
            end = event["ts"] + event["dur"]
            while open_slices and event["ts"] >= open_slices[-1] - 0.002:
                open_slices.pop()
            assert not open_slices or end <= open_slices[-1] + 0.002, event
            open_slices.append(end)
        elif event["ph"] == "b":
            open_names[track_of(event)].append(event["name"])
        elif event["ph"] == "e":
            assert open_names[track_of(event)].pop() == event["name"]
    assert not any(open_names.values())


def test_a_step_holds_its_parts(tmp_path: Path) -> None:
    trace = ChromeTrace(tmp_path / "t.json", clock=Clock(99.0))
    trace.stepped(step(miss=True, executable='odd "name"'))
    trace.close()
    events = read(tmp_path / "t.json")
    check(events)
    whole, *parts = slices(events)
    assert whole["name"] == "decode 4x1+16"
    assert (whole["ts"], whole["dur"]) == (1e6, 10000.0)
    assert whole["args"] == {
        "bucket": "4x1+16", "executable": 'odd "name"', "live_rows": 3, "live_tokens": 3, "padding_tokens": 1,
        "sequences": [0, 1, 2], "miss": True,
    }  # fmt: skip
    assert [(part["name"], part["ts"] - 1e6, part["dur"]) for part in parts] == [
        ("schedule", 0, 1000), ("pad", 1000, 2000), ("execute", 3000, 6000), ("sample", 9000, 1000),
    ]  # fmt: skip


def test_a_request_is_queued_then_prefilled_then_decoded(tmp_path: Path) -> None:
    clock = Clock()
    trace = ChromeTrace(tmp_path / "t.json", clock=clock)
    trace.arrived("a", 10)
    clock.now = 100.7
    trace.admitted("a", 0.5, 4)
    clock.now = 103.0
    trace.finished(summary("a"))
    trace.close()
    events = read(tmp_path / "t.json")
    check(events)
    track = [(e["ph"], e["name"], round(e["ts"])) for e in of(events, "a")]
    assert track == [
        ("b", "request", 0), ("b", "queued", 0), ("e", "queued", 500000), ("b", "prefill", 500000),
        ("e", "prefill", 1000000), ("b", "decode", 1000000), ("e", "decode", 3000000), ("e", "request", 3000000),
    ]  # fmt: skip
    counted = [(e["args"]["running"], e["args"]["waiting"]) for e in events if e["ph"] == "C"]
    assert counted == [(0, 1), (1, 0), (0, 0)]
    assert of(events, "a")[-1]["args"] == {
        "output_tokens": 5, "finish_reasons": ["stop"]
    }  # fmt: skip


def test_requests_that_never_came_so_far(tmp_path: Path) -> None:
    clock = Clock()
    trace = ChromeTrace(tmp_path / "t.json", clock=clock)
    for name in ("queued only", "no token"):
        trace.arrived(name, 10)
    trace.admitted("no token", 0.25, 0)
    clock.now = 101.0
    for name in ("queued only", "no token", "unknown"):
        trace.finished(summary(name, first_token_s=None, finish_reasons=("abort",)))
    trace.close()
    events = read(tmp_path / "t.json")
    check(events)
    names = {name: [e["name"] for e in of(events, name) if e["ph"] == "b"] for name in
             ("queued only", "no token", "unknown")}  # fmt: skip
    assert names == {"queued only": ["request", "queued"], "no token": ["request", "queued", "prefill"],
                     "unknown": []}  # fmt: skip
    assert [e["args"] for e in events if e["ph"] == "C"][-1] == {"running": 0, "waiting": 0}


def test_a_real_run(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    kept, trace = Kept(), ChromeTrace(file)
    made = engine(toy_bundle(tmp_path), Observers([kept, trace]))
    run(made, ["one", "another", "a third, longer one", "four", "and five"], cancelled=["4"])
    trace.close()
    events = read(file)
    check(events)
    steps = [event for event in slices(events) if "args" in event]
    assert [(e["name"], e["args"]["live_tokens"]) for e in steps] == [
        (f"{s.phase} {s.bucket}", s.live_tokens) for s in kept.steps
    ]
    assert {e["args"]["id"] for e in events if e["name"] == "request" and e["ph"] == "b"} == {"0", "1", "2", "3", "4"}
    for event, record in zip(steps, kept.steps, strict=True):
        parts = record.schedule_s + record.prepare_s + record.execute_s + record.sample_s
        assert event["dur"] == pytest.approx(parts * 1e6, abs=0.01)


def test_steps_that_overlap_by_a_rounding_are_moved_apart(tmp_path: Path) -> None:
    trace = ChromeTrace(tmp_path / "t.json", clock=Clock())
    trace.stepped(step(started_s=100.0))
    trace.stepped(step(started_s=100.0099))
    trace.close()
    check(read(tmp_path / "t.json"))


def test_names_cannot_break_out_of_their_strings(tmp_path: Path) -> None:
    trace = ChromeTrace(tmp_path / "t.json")
    trace.arrived('"},\n{"é', 1)
    trace.finished(summary('"},\n{"é'))
    trace.close()
    assert [e["args"]["id"] for e in read(tmp_path / "t.json") if "id" in e.get("args", {})] == ['"},\n{"é']


SCRIPT = """
import os, signal, sys
from llmc.server.telemetry.chrome_trace import ChromeTrace
from tests.server.telemetry.samples import step
trace = ChromeTrace(sys.argv[1])
for i in range(300):
    trace.stepped(step(started_s=100.0 + i))
trace.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_trace_of_a_killed_server_lacks_only_its_bracket(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    killed = subprocess.run([sys.executable, "-c", SCRIPT, file], cwd=Path(__file__).parents[3], check=False)
    assert killed.returncode == -signal.SIGKILL
    events: Events = json.loads(file.read_text().rstrip().removesuffix(",") + "]")
    assert len(slices(events)) == 1500


def test_a_trace_ends_at_its_size_cap_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = ChromeTrace(tmp_path / "t.json", max_bytes=1 << 20)
    with caplog.at_level(logging.WARNING, "llmc"):
        for i in range(4000):
            trace.stepped(step(started_s=100.0 + i))
            if i % 500 == 0:
                trace.flush()
        trace.close()
    events = read(tmp_path / "t.json")
    check(events)
    assert events[-1]["name"] == "the trace ends here: it reached 1 MiB"
    assert (1 << 20) - 300_000 < (tmp_path / "t.json").stat().st_size <= (1 << 20) + 300
    assert [record.getMessage() for record in caplog.records] == [
        f"the step trace {tmp_path / 't.json'} ends here: it reached 1 MiB; serving goes on"
    ]


def test_a_full_disk_ends_the_trace_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    trace = ChromeTrace("/dev/full")
    with caplog.at_level(logging.WARNING, "llmc"):
        for _ in range(3):
            trace.stepped(step())
            assert trace.flush()
        trace.close()
    assert len(caplog.records) == 1
    assert "the step trace /dev/full ends here: No space left on device" in caplog.text


def test_a_trace_that_cannot_be_opened_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot write the step trace .*No such file.*--profile"):
        ChromeTrace(tmp_path / "absent" / "t.json")


def test_an_unused_trace_is_a_trace(tmp_path: Path) -> None:
    trace = ChromeTrace(tmp_path / "t.json")
    trace.close()
    trace.close()
    assert [event["ph"] for event in read(tmp_path / "t.json")] == ["M", "M", "i"]
