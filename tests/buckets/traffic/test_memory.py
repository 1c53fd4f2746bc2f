"""A trace is read and scheduled in memory that its size does not matter to."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import pytest

from tests.tiers import default_cases

SCRIPT = """
import resource, sys
from pathlib import Path
from llmc.buckets.limits import Limits
from llmc.buckets.traffic.events import PromptGroup
from llmc.buckets.traffic.reader import Trace
from llmc.buckets.traffic.schedule import schedule
from llmc.buckets.traffic.step_time import AssumedStepTime

now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (48 << 20),) * 2)
trace = Trace(sys.argv[1])
events = schedule(trace, Limits(64), step_time=AssumedStepTime())
print(trace.size, sum(len(event.lengths) for event in events if isinstance(event, PromptGroup)))
"""


@default_cases(1)
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is set from /proc")
@pytest.mark.parametrize("compressed", [False, True])
def test_a_trace_larger_than_the_memory_allowed(tmp_path, compressed):
    path = tmp_path / ("trace.csv.gz" if compressed else "trace.csv")
    block = b"".join(b"%d,%d,3,%s\n" % (i, 5 + i % 50, b"x" * 1000) for i in range(1000))
    with gzip.open(path, "wb", 1) if compressed else path.open("wb") as file:
        file.write(b"arrival,prompt_tokens,output_tokens,note\n")
        for _ in range(90):
            file.write(block)
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(path)], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.split() == [str(path.stat().st_size), "90000"]


WHOLE = """
import resource, sys
from pathlib import Path
from llmc.buckets.traffic.profile import profile
from llmc.buckets.traffic.reader import Trace
from llmc.buckets.traffic.recording import anonymised, merged, write

Trace(sys.argv[1])
now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (24 << 20),) * 2)
trace = Trace(sys.argv[1])
write(sys.argv[2], anonymised(merged([trace, Trace(sys.argv[1])], "start").requests, jitter=5.0))
print(trace.format.name, profile(Trace(sys.argv[2]), has_times=True).requests)
"""


def openai(location: int) -> str:
    usage = {"prompt_tokens": 5 + location % 50, "completion_tokens": 3}
    return json.dumps({"created": 1.7e9 + location, "usage": usage, "text": "x" * 4000})


def vllm(location: int) -> str:
    at = f"INFO 11-23 {location // 3600:02d}:{location // 60 % 60:02d}:{location % 60:02d} [logger.py:1]"
    ids = list(range(100, 940))
    return (
        f"{at} Received request r{location}: prompt: 'x', params: none, prompt_token_ids: {ids}, lora: None.\n"
        f"{at} Generated response r{location}: output: 'x', output_token_ids: [1, 2], finish_reason: stop"
    )


def otlp(location: int) -> str:
    names = ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens")
    attributes = [{"key": name, "value": {"intValue": "7"}} for name in names]
    span = {
        "traceId": f"{location:032x}",
        "spanId": f"{location:016x}",
        "startTimeUnixNano": str(10**18 + location * 10**9),
    }
    spans = [{**span, "attributes": [*attributes, {"key": "text", "value": {"stringValue": "x" * 4000}}]}]
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]})


@default_cases(1)
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is set from /proc")
@pytest.mark.parametrize("line", [openai, vllm, otlp])
def test_a_log_larger_than_the_memory_allowed_is_built_a_recording_and_looked_at(tmp_path, line):
    path = tmp_path / "log"
    with path.open("w") as file:
        for index in range(8000):
            file.write(line(index) + "\n")
    assert path.stat().st_size > 30 << 20
    script = [sys.executable, "-c", WHOLE, str(path), str(tmp_path / "recording.jsonl")]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.split()[1] == "16000"
