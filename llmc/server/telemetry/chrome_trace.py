"""The engine's steps and requests over time, as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

Chrome's trace event format, an array of events in JSON, times in microseconds:

    trace  = "[" { event "," } [ note "]" ]

The format asks for no closing bracket, so that the file of a killed server is a trace, too, up to its last quarter of a
second. One thread track has the steps, in each its parts (schedule, pad, execute, sample); each request has a track of
its own (queued, prefill, decode); a counter has the requests that run and wait.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Literal

from llmc.runtime.engine.observer import Observer, RequestSummary, StepRecord
from llmc.server.telemetry.background_file import BackgroundFile

MAX_BYTES = 256 << 20
"""Where a trace ends: about 300,000 steps."""

_Kind = Literal["arrived", "admitted", "finished"]
_Event = StepRecord | tuple[_Kind, float, str, float | RequestSummary, int]

_quoted = lru_cache(4096)(json.dumps)


class ChromeTrace(Observer):
    """Writes the trace to `path` while the engine runs; raises InputError when `path` cannot be opened.

    The engine only queues what happened. A full disk, or `max_bytes`, ends the trace with one logged line, and whatever
    happens nothing is raised into the engine. `clock` is the clock of StepRecord.started_s.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._render = _Render(clock())
        self._file = BackgroundFile[_Event](
            Path(path), self._render, what="the step trace", flag="--profile", open_flags=os.O_TRUNC,
            max_bytes=max_bytes, closing=self._render.closing,
        )  # fmt: skip

    def arrived(self, request_id: str, prompt_tokens: int) -> None:
        """Begin the request's track."""
        self._file.put(("arrived", self._clock(), request_id, 0.0, prompt_tokens))

    def admitted(self, request_id: str, queue_s: float, cached_tokens: int) -> None:
        """Begin the request's prefill."""
        self._file.put(("admitted", self._clock(), request_id, queue_s, cached_tokens))

    def stepped(self, record: StepRecord) -> None:
        """Draw the step."""
        self._file.put(record)

    def finished(self, summary: RequestSummary) -> None:
        """End the request's track."""
        self._file.put(("finished", self._clock(), summary.request_id, summary, 0))

    def flush(self) -> bool:
        """Wait until what happened before is in the file (or lost)."""
        return self._file.flush()

    def close(self) -> None:
        """Finish the array and close the file."""
        self._file.close()


class _Request:
    """A request's track: times are in seconds, and never go back."""

    def __init__(self, number: int, arrived: float) -> None:
        self.track = f'{{"local":"{number:#x}"}}'
        self.arrived = self.last = arrived
        self.admitted = False

    def at(self, moment: float) -> float:
        self.last = max(self.last, moment)
        return self.last


class _Render:
    """Text of events; runs in the file's thread, and keeps the requests that are not over."""

    def __init__(self, origin: float) -> None:
        self._origin = origin
        self._step_end = origin
        self._requests: dict[str, _Request] = {}
        self._running = self._arrivals = 0
        self._opening = (
            "[\n"
            '{"ph":"M","name":"process_name","pid":1,"tid":0,"args":{"name":"llmc"}},\n'
            '{"ph":"M","name":"thread_name","pid":1,"tid":1,"args":{"name":"engine"}},\n'
        )

    def __call__(self, event: _Event) -> str:
        opening, self._opening = self._opening, ""
        if isinstance(event, StepRecord):
            return opening + self._step(event)
        kind, now, request_id, what, tokens = event
        if kind == "arrived":
            text = self._arrived(now, request_id, tokens)
        elif kind == "admitted" and isinstance(what, float):
            text = self._admitted(request_id, what, tokens)
        else:
            text = self._finished(now, request_id, what if isinstance(what, RequestSummary) else None)
        waiting = len(self._requests) - self._running
        return (
            f'{opening}{text}{{"ph":"C","name":"requests","pid":1,"tid":0,"ts":{self._us(now)},'
            f'"args":{{"running":{self._running},"waiting":{waiting}}}}},\n'
        )

    def closing(self, reason: str | None) -> str:
        """The last event and the closing bracket."""
        opening, self._opening = self._opening, ""
        why = "closed" if reason is None else f"the trace ends here: {reason}"
        note = {"ph": "i", "name": why, "s": "p", "pid": 1, "tid": 1, "ts": float(self._us(self._step_end))}
        return f"{opening}{json.dumps(note)}\n]\n"

    def _us(self, moment: float) -> str:
        return f"{max(0.0, moment - self._origin) * 1e6:.3f}"

    def _step(self, r: StepRecord) -> str:
        parts = (("schedule", r.schedule_s), ("pad", r.prepare_s), ("execute", r.execute_s), ("sample", r.sample_s))
        total = sum(seconds for _, seconds in parts)
        # steps follow each other in one thread; if rounding makes two overlap, the later one starts later
        start = max(r.started_s, self._step_end)
        self._step_end = start + total
        begin = (start - self._origin) * 1e6
        head = '"pid":1,"tid":1,"ts":'
        lines = [
            f'{{"ph":"X","name":"{r.phase} {r.bucket}",{head}{begin:.3f},"dur":{total * 1e6:.3f},"args":'
            f'{{"bucket":"{r.bucket}","executable":{_quoted(r.executable)},"live_rows":{r.live_rows},'
            f'"live_tokens":{r.live_tokens},"padding_tokens":{r.padding_tokens},"sequences":{list(r.requests)},'
            f'"miss":{"true" if r.miss else "false"}}}}},\n'
        ]
        for name, seconds in parts:
            took = seconds * 1e6
            lines.append(f'{{"ph":"X","name":"{name}",{head}{begin:.3f},"dur":{took:.3f}}},\n')
            begin += took
        return "".join(lines)

    def _track(self, mark: Literal["b", "e"], request: _Request, name: str, moment: float, args: str = "") -> str:
        return (
            f'{{"ph":"{mark}","cat":"request","id2":{request.track},"name":{name},"pid":1,"tid":0,'
            f'"ts":{self._us(request.at(moment))}{args}}},\n'
        )

    def _arrived(self, now: float, request_id: str, tokens: int) -> str:
        self._arrivals += 1
        request = self._requests[request_id] = _Request(self._arrivals, now)
        args = f',"args":{{"id":{json.dumps(request_id)},"prompt_tokens":{tokens}}}'
        return self._track("b", request, '"request"', now, args) + self._track("b", request, '"queued"', now)

    def _admitted(self, request_id: str, queue_s: float, cached: int) -> str:
        request = self._requests.get(request_id)
        if request is None or request.admitted:
            return ""
        request.admitted = True
        self._running += 1
        moment = request.arrived + queue_s
        return self._track("e", request, '"queued"', moment) + self._track(
            "b", request, '"prefill"', moment, f',"args":{{"cached_tokens":{cached}}}'
        )

    def _finished(self, now: float, request_id: str, summary: RequestSummary | None) -> str:
        request = self._requests.pop(request_id, None)
        if request is None or summary is None:
            return ""
        if not request.admitted:
            text = self._track("e", request, '"queued"', now)
        else:
            self._running -= 1
            first = summary.first_token_s
            text = self._track("e", request, '"prefill"', now if first is None else request.arrived + first)
            if first is not None:
                text += self._track("b", request, '"decode"', request.last)
                text += self._track("e", request, '"decode"', now)
        ended = {"output_tokens": summary.output_tokens, "finish_reasons": summary.finish_reasons}
        return text + self._track("e", request, '"request"', now, f',"args":{json.dumps(ended)}')
