"""vLLM's high-level profile on Gaudi (VLLM_PROFILER_ENABLED), from the engine's steps: for perfetto.habana.ai.

Chrome's trace event format, with the names and fields of vLLM's HabanaHighLevelProfiler and HabanaProfilerCounterHelper
(HabanaAI/vllm-hpu-extension, vllm_hpu_extension/profiler.py, read in 2025):

    tid 1, ph C   "utils": counters of each step, in args        tid 3, ph X   what ran, nested
    prepare_input_tensors · execute_model ⊃ model_PHASE_bsB_seqS_graphsT · sample

Times are microseconds since the epoch. `seq` is a prompt's padded query, and a decode step's padded context, in tokens.
`graphsT` says that the step's bucket was planned, whether or not a graph of it was captured.
What counts blocks of the KV cache is not among the counters (cache_…, const_…): /metrics has its use.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmc.runtime.engine.observer import Observer, StepRecord
from llmc.server.telemetry.background_file import BackgroundFile

MAX_BYTES = 256 << 20
"""Where a trace ends."""

COUNTER, INTERNAL = 1, 3
"""Threads of vLLM's trace; 2 has requests, which --profile draws."""


class VllmTrace(Observer):
    """Writes the trace to `path`; raises InputError when it cannot be opened. `clock` and `wall` are the clock of
    StepRecord.started_s and that of the epoch, both in seconds."""

    def __init__(
        self, path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.perf_counter, wall: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._render = _Render(wall() - clock())
        self._file = BackgroundFile[StepRecord](
            Path(path), self._render, what="the high-level profile", flag="another working folder",
            open_flags=os.O_TRUNC, max_bytes=max_bytes, closing=self._render.closing,
        )  # fmt: skip

    def stepped(self, record: StepRecord) -> None:
        """Draw the step."""
        self._file.put(record)

    def flush(self) -> bool:
        """Wait until what happened before is in the file (or lost)."""
        return self._file.flush()

    def close(self) -> None:
        """Finish the array and close the file."""
        self._file.close()


def file_name() -> str:
    """As vLLM names its file, one for each process, in the working folder."""
    return f"server_events_llmc-instance-{os.getpid()}.json"


class _Render:
    """Text of steps; runs in the file's thread."""

    def __init__(self, offset: float) -> None:
        self._offset = offset
        self._pid = os.getpid()
        self._steps = 0
        self._average = 0.0
        self._opening = "[\n"

    def __call__(self, record: StepRecord) -> str:
        opening, self._opening = self._opening, ""
        begin = (record.started_s + record.schedule_s + self._offset) * 1e6
        prepare, execute, sample = (s * 1e6 for s in (record.prepare_s, record.execute_s, record.sample_s))
        sequence = record.query if record.phase == "prompt" else record.context
        graph = f"model_{record.phase}_bs{record.batch}_seq{sequence}_graphs{'F' if record.miss else 'T'}"
        events = [
            self._event("C", "utils", begin + prepare, COUNTER, args=self._counters(record, sequence)),
            self._event("X", "prepare_input_tensors", begin, INTERNAL, dur=prepare, args=None),
            self._event("X", "execute_model", begin + prepare, INTERNAL, dur=execute, args=None),
            self._event("X", graph, begin + prepare, INTERNAL, dur=execute, args=None),
            self._event("X", "sample", begin + prepare + execute, INTERNAL, dur=sample, args=None),
        ]
        return opening + "".join(json.dumps(event) + ",\n" for event in events)

    def closing(self, reason: str | None) -> str:
        """A last event that says why it is the last, and the closing bracket."""
        opening, self._opening = self._opening, ""
        why = "closed" if reason is None else f"the profile ends here: {reason}"
        event = self._event("i", why, time.time() * 1e6, INTERNAL)
        return f"{opening}{json.dumps(event)}\n]\n"

    def _event(self, kind: str, name: str, at: float, thread: int, **more: Any) -> dict[str, Any]:
        return {"pid": self._pid, "tid": thread, "ph": kind, "name": name, "ts": at, **more}

    def _counters(self, record: StepRecord, sequence: int) -> dict[str, float]:
        """vLLM's, of one step; throughputs are rows, or tokens, a second of `execute_s`."""
        phase, took = record.phase, record.execute_s or 1e-9
        real = record.live_rows / took
        self._average += (real - self._average) / (self._steps + 1)
        held = record.live_tokens if phase == "prompt" else sum(record.lengths)
        found: dict[str, float] = {
            f"{phase}_bucket_batch_size": record.batch,
            f"{phase}_batch_size": record.live_rows,
            f"{phase}_bucket_seq_len": sequence,
            f"{phase}_seq_len": max(record.lengths, default=0),
            f"{phase}_bucket_gen_throughput": record.batch / took,
            f"{phase}_real_gen_throughput": real,
            f"{phase}_batch_token_utilization": held / (record.batch * max(1, sequence)),
            "average_real_throughput": self._average,
            "engine_iteration": self._steps,
        }
        if phase == "prompt":
            found["prompt_bucket_in_throughput"] = record.batch * record.query / took
            found["prompt_real_in_throughput"] = record.live_tokens / took
        self._steps += 1
        return found
