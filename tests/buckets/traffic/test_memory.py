"""A trace is read and scheduled in memory that its size does not matter to."""

from __future__ import annotations

import gzip
import subprocess
import sys

import pytest

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
