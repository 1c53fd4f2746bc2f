"""What a server recorded is a trace that planning reads back."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llmc.buckets.traffic.reader import Trace
from llmc.errors import InputError
from llmc.runtime.engine.observer import Observers
from llmc.server.telemetry.requests import TrafficRecorder
from tests.cli.conftest import here, llmc  # noqa: F401
from tests.cli.helpers import Llmc
from tests.server.telemetry.samples import Kept, engine, run, summary, toy_bundle

LINE = '{"time": 1.5, "prompt_tokens": 10, "output_tokens": 3}\n'


def lengths(path: Path) -> list[tuple[int, int, int]]:
    return [(request.prompt, request.output, request.cached) for request in Trace(path)]


def test_requests_of_a_real_run_read_back_exactly(tmp_path: Path) -> None:
    file = tmp_path / "traffic.jsonl"
    kept, recorder = Kept(), TrafficRecorder(file)
    built = engine(toy_bundle(tmp_path), Observers([kept, recorder]))
    run(built, ["secretword", "secretword again", "x", "another secretword"], cancelled=["2"])
    recorder.close()
    recorded = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(r["prompt_tokens"], r["output_tokens"], r.get("cached_tokens", 0)) for r in recorded] == [
        (s.prompt_tokens, s.output_tokens, s.cached_tokens) for s in kept.summaries
    ]
    assert [r["time"] for r in recorded] == [round(s.arrived_at, 3) for s in kept.summaries]
    whole = [s for s in kept.summaries if s.output_tokens]
    assert sorted(lengths(file)) == sorted((s.prompt_tokens, s.output_tokens, s.cached_tokens) for s in whole)
    assert "secret" not in file.read_text()
    assert {key for r in recorded for key in r} <= {"time", "prompt_tokens", "output_tokens", "cached_tokens"}


def test_plans_are_evaluated_on_a_recording(llmc: Llmc, tmp_path: Path) -> None:  # noqa: F811
    file = tmp_path / "traffic.jsonl"
    recorder = TrafficRecorder(file)
    for i in range(40):
        recorder.finished(summary(str(i), arrived_at=1000.0 + i, prompt_tokens=3 + i % 9, cached_tokens=0))
    recorder.close()
    llmc("plan", "--max-model-len", 64, "--max-num-seqs", 2, "-o", "plan.json")
    found = llmc("plan", "evaluate", "plan.json", "--traffic", file, "--json").json
    assert found["prompt"]["requests"] == 40
    assert found["prompt"]["uncovered"] == found["decode"]["uncovered"] == 0


def test_a_request_that_was_cut_counts_with_what_it_got(tmp_path: Path) -> None:
    recorder = TrafficRecorder(tmp_path / "t.jsonl")
    recorder.finished(summary("a", finish_reasons=("abort",), output_tokens=2))
    recorder.finished(summary("b", finish_reasons=("abort",), output_tokens=0, queue_s=None, cached_tokens=0))
    recorder.close()
    trace = Trace(tmp_path / "t.jsonl")
    assert [(request.prompt, request.output) for request in trace] == [(10, 2)]
    assert trace.skipped_empty == 1


def test_choices_of_one_request_are_a_line_each(tmp_path: Path) -> None:
    recorder = TrafficRecorder(tmp_path / "t.jsonl")
    recorder.finished(summary("a", finish_reasons=("stop", "stop", "length"), n=3, output_tokens=11, cached_tokens=0))
    recorder.close()
    assert lengths(tmp_path / "t.jsonl") == [(10, 4, 0), (10, 4, 9), (10, 3, 9)]


def test_a_recording_goes_on_where_it_ended(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(LINE)
    for _ in range(2):
        recorder = TrafficRecorder(file)
        recorder.finished(summary())
        recorder.close()
        recorder.close()
    assert lengths(file) == [(10, 3, 0), (10, 5, 4), (10, 5, 4)]


@pytest.mark.parametrize("cut", [1, 5, 9, 20, len(LINE) - 2])
def test_half_a_line_from_an_earlier_crash_is_cut_off(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(LINE + LINE[:cut])
    recorder = TrafficRecorder(file)
    recorder.finished(summary())
    recorder.close()
    assert lengths(file) == [(10, 3, 0), (10, 5, 4)]


def test_a_line_that_lacks_only_its_newline_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(LINE + LINE.rstrip())
    recorder = TrafficRecorder(file)
    recorder.finished(summary())
    recorder.close()
    assert lengths(file) == [(10, 3, 0), (10, 3, 0), (10, 5, 4)]


@pytest.mark.parametrize("text", ["notes of mine", "TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\n", LINE + "a note"])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(text)
    with pytest.raises(InputError, match=r"mine\.txt is not a recording.*--record-traffic"):
        TrafficRecorder(file)
    assert file.read_text() == text


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot write the traffic recording .*No such file.*--record-traffic"):
        TrafficRecorder(tmp_path / "absent" / "t.jsonl")
    with pytest.raises(InputError, match=r"Is a directory"):
        TrafficRecorder(tmp_path)


def test_a_full_disk_is_logged_once_and_serving_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    recorder = TrafficRecorder("/dev/full")
    with caplog.at_level(logging.WARNING, "llmc"):
        for _ in range(3):
            recorder.finished(summary())
            assert recorder.flush()
        recorder.close()
    assert len(caplog.records) == 1
    assert "cannot write /dev/full: No space left on device" in caplog.text
    assert recorder.lost == 3


SCRIPT = """
import os, signal, sys
from llmc.server.telemetry.requests import TrafficRecorder
from tests.server.telemetry.samples import summary
recorder = TrafficRecorder(sys.argv[1])
for i in range(500):
    recorder.finished(summary(str(i), prompt_tokens=i + 10))
recorder.flush()
recorder.finished(summary())
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_flushed_survives_a_kill(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    killed = subprocess.run([sys.executable, "-c", SCRIPT, file], cwd=Path(__file__).parents[3], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [prompt for prompt, _, _ in lengths(file)][:500] == list(range(10, 510))


def test_several_servers_append_to_one_file(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    recorders = [TrafficRecorder(file) for _ in range(3)]
    for i in range(1000):
        recorders[i % 3].finished(summary(str(i), prompt_tokens=10 + i))
    for recorder in recorders:
        recorder.close()
    assert sorted(prompt for prompt, _, _ in lengths(file)) == list(range(10, 1010))
    assert file.stat().st_mode & 0o777 == 0o644
