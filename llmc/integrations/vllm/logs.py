"""vLLM's logs: requests, batch sizes (VLLM_LOG_BATCHSIZE_INTERVAL) and the table of --cudagraph-metrics.

The token ids in a request log are counted, and never kept.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from llmc.buckets.traffic.formats.base import Fields, Found, FoundRows, Head, Location, RequestFormat, StepFormat
from llmc.buckets.traffic.rows import Rows
from llmc.buckets.traffic.step_histogram import StepHistogram, StepKey
from llmc.buckets.traffic.timestamps import Moment
from llmc.errors import InputError

PREFIX = re.compile(
    r"(?:\((\w+(?: rank=\d+)?) pid=(\d+)\)(?:\x1b\[[\d;]*m)? )?"
    r"(?:\x1b\[[\d;]*m)?(?:DEBUG|INFO|WARNING|ERROR)(?:\x1b\[[\d;]*m)? (\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)",
    re.ASCII,
)
"""A line of vLLM's log, from its issues and documents: process, level (coloured on a terminal), month-day and time
without a year, [file:line], message."""

_DAYS_BEFORE = (0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334)
_DAY = 86_400


class LogClock:
    """Times of the lines of one log, in order, also over a new year. The lines have no year and no time zone."""

    def __init__(self) -> None:
        self._added = 0
        self._last = 0.0
        self._leap = False

    def read(self, line: str) -> Moment | None:
        """Return the time of `line`; None for a line without one."""
        match = PREFIX.search(line, 0, 512)
        if match is None:
            return None
        month, day, hour, minute, second = (int(match[group]) for group in range(3, 8))
        self._leap |= (month, day) == (2, 29)
        days = _DAYS_BEFORE[(month - 1) % 12] + day + (self._leap and month > 2)
        now = self._added + days * _DAY + hour * 3600 + minute * 60 + second
        if now < self._last - 180 * _DAY:
            self._added += 365 * _DAY
            now += 365 * _DAY
            self._leap = False
        self._last = max(self._last, now)
        return Moment(float(now), "relative")


def process(line: str) -> tuple[str, str]:
    """Return the process that wrote `line`: its name, as "Worker_TP0" or "VllmWorker rank=0", and its number; "" if
    missing.
    """
    match = PREFIX.search(line, 0, 512)
    return ("", "") if match is None or match[1] is None else (match[1], match[2])


RECEIVED = re.compile(r"\b(?:Received request (\S+): |Request (\S+) details: prompt: )")
GENERATED = re.compile(r"\bGenerated response (\S+?)( \(streaming (?:delta|complete)\))?(: output| details): ")
DELTA = " (streaming delta)"
DETAILS = " details"
PROMPT_IDS = ", prompt_token_ids: "
OUTPUT_IDS = ", output_token_ids: "
DETAILED_IDS = " details: output_token_ids: "
PROMPT_TEXT = re.compile(r"\bprompt: ('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")")
OUTPUT_TEXT = re.compile(r"\boutput: ('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")")

ESCAPE = re.compile(r"\\(?:x..|u.{4}|U.{8}|.)")
"""One character escaped by Python's repr."""

WAITING, ANSWERED = 1 << 16, 1 << 10
"""Most requests kept until they are answered, and then for further answers; the oldest are dropped."""

REMEDY = "start vLLM with --enable-log-requests --enable-log-outputs and VLLM_LOGGING_LEVEL=DEBUG"


@dataclass
class _Request:
    arrived: Moment | None
    prompt: int = 0
    streamed: int = 0
    detailed: int = 0
    answers: int = 0


class VllmRequests(RequestFormat):
    """Lines "Received request …" and "Generated response …" of a server's log, among any others.

    A request counts when it is answered, and arrives when it is received. In older versions the first line has the
    prompt's token ids, later a line "Request … details" at DEBUG. The ids of an answer are in a line "Generated
    response … details" at DEBUG before it, from 0.32 on. The deltas of a streamed answer are counted. Several answers
    to one prompt are as many requests, whose prompt is cached for all but the first. Times are seconds without a year.
    """

    name = "vllm-requests"
    title = "vLLM request log"
    source = (
        "vLLM, vllm/entrypoints/logger.py at 01ff126 (ids in one line) and 63c2b7a (ids at DEBUG); 0.33.0, "
        "vllm/entrypoints/serve/utils/request_logger.py (ids of answers at DEBUG)"
    )

    def recognises(self, head: Head) -> bool:
        """Return whether a line reports a request, with lengths or without."""
        return RECEIVED.search(head.text) is not None or GENERATED.search(head.text) is not None

    def rows(self, path: str, lines: Iterator[str], fields: Fields) -> Rows:
        """Return the rows. Also raises InputError for a log without lengths, and for one that cuts them
        (--max-log-len).
        """
        location = Location(path)
        return FoundRows(location, _Log(location).read(lines))


class _Log:
    def __init__(self, location: Location) -> None:
        self._location = location
        self._clock = LogClock()
        self._waiting: OrderedDict[str, _Request] = OrderedDict()
        self._answered: OrderedDict[str, _Request] = OrderedDict()
        self._longest = 0
        self._cut = 0
        self.received = self.answered = self.without = self.forgotten = 0
        location.notes = self._notes

    def read(self, lines: Iterator[str]) -> Iterator[Found]:
        for line in self._location.counted(lines):
            if match := RECEIVED.search(line):
                self._received(line, match[1] or match[2])
            elif match := GENERATED.search(line):
                found = self._generated(line, match)
                if found is not None:
                    self.answered += 1
                    yield found
        if self._cut > 1:
            raise InputError(
                f"{self._location.path}: the lengths are cut: {self._cut} texts of {self._longest} characters have "
                f"{self._longest} tokens, as --max-log-len {self._longest} leaves of longer ones; {REMEDY}, and "
                "without --max-log-len"
            )
        if not self.answered:
            raise InputError(
                f"{self._location.path}: the log has no lengths: {self.received} requests received, none with the "
                f"token ids of prompt and output; {REMEDY}, or read the server's /metrics instead"
            )

    def _received(self, line: str, name: str) -> None:
        request = self._waiting.get(name)
        if request is None:
            self.received += 1
            request = self._waiting[name] = _Request(self._clock.read(line))
            if len(self._waiting) > WAITING:
                self._waiting.popitem(last=False)
                self.forgotten += 1
        ids = _ids(line, PROMPT_IDS)
        if ids:
            request.prompt = ids
            self._check(line, PROMPT_TEXT, ids)

    def _generated(self, line: str, match: re.Match[str]) -> Found | None:
        name = next((name for name in (match[1], f"{match[1]}-0") if name in self._waiting), match[1])
        request = self._waiting.get(name) or self._answered.get(name) or self._answered.get(f"{name}-0")
        if request is None:
            self.without += match[2] != DELTA and match[3] != DETAILS
            return None
        if match[3] == DETAILS:
            request.detailed = _ids(line, DETAILED_IDS)
            return None
        ids, request.detailed = request.detailed or _ids(line, OUTPUT_IDS), 0
        if match[2] == DELTA:
            request.streamed += ids
            return None
        if ids:
            self._check(line, OUTPUT_TEXT, ids)
        output = ids or request.streamed
        request.streamed = 0
        if not request.prompt or not output:
            self.without += 1
            return None
        request.answers += 1
        if self._waiting.pop(name, None) is not None:
            self._answered[name] = request
            if len(self._answered) > ANSWERED:
                self._answered.popitem(last=False)
        return request.arrived, request.prompt, output, 0 if request.answers == 1 else request.prompt

    def _check(self, line: str, literal: re.Pattern[str], ids: int) -> None:
        """Detect whether text and ids are cut to the same number, as by --max-log-len; the longest ones show it."""
        if ids < self._longest:
            return
        if ids > self._longest:
            self._longest, self._cut = ids, 0
        text = literal.search(line)
        if text is not None and len(ESCAPE.sub("?", text[1])) - 2 == ids:
            self._cut += 1

    def _notes(self) -> list[str]:
        unanswered = self.forgotten + len(self._waiting)
        counts = ((self.without, "answers without lengths"), (unanswered, "requests without an answer"))
        return [f"{count} {what} were left out" for count, what in counts if count]


def _ids(line: str, before: str) -> int:
    """The number of token ids after the last `before`; user text comes before it."""
    start = line.rfind(before)
    if start < 0:
        return 0
    start += len(before)
    end = line.find("]", start)
    return 0 if line[start : start + 1] != "[" or end <= start + 1 else line.count(",", start, end) + 1


LINE = "Batchsize forward time stats (batchsize, count, median_time(ms)): "
ENTRY = re.compile(r"\((\d{1,9}), (\d{1,12}), [0-9.e+-]+\)")
RANK = re.compile(r"_(?:TP|PP|EP|DCP)\d+| rank=\d+")


class VllmBatchSizes(StepFormat):
    """The last line of each process, which counts all its steps since its start, except sizes seen only once.

    Sizes are tokens of a step after padding to a CUDA graph. Ranks of one tensor or pipeline parallel group take the
    same steps, so only the first in the log is counted.
    """

    name = "vllm-batchsizes"
    title = "vLLM batch-size log"
    source = "vLLM 01fb6e2, vllm/forward_context.py; V1 hands it the padded size (v1/worker/gpu_model_runner.py)"
    tried = 2

    def recognises(self, head: Head) -> bool:
        return LINE in head.text

    def steps(self, path: str, lines: Iterator[str]) -> StepHistogram:
        """Return the steps of all processes together."""
        first: dict[str, str] = {}
        ended: Counter[int] = Counter()
        running: dict[tuple[str, str], Counter[int]] = {}
        location = Location(path)
        for line in location.counted(lines):
            start = line.find(LINE)
            if start < 0:
                continue
            writer = process(line)
            if first.setdefault(RANK.sub("", writer[0]), writer[0]) != writer[0]:
                continue
            found = Counter({int(size): int(count) for size, count in ENTRY.findall(line, start)})
            if not found:
                raise InputError(f"{location}: the line lists no (batchsize, count, time); it is damaged or cut")
            before = running.get(writer, Counter())
            if any(found[size] < count for size, count in before.items()):
                ended.update(before)
            running[writer] = found
        for last in running.values():
            ended.update(last)
        if not ended:
            raise InputError(f"{path}: no line lists batch sizes; start vLLM with VLLM_LOG_BATCHSIZE_INTERVAL=60")
        counts = {StepKey("any", (size,), None): count for size, count in sorted(ended.items())}
        return StepHistogram(("tokens",), counts, padded=True)


HEADER = re.compile(
    r"\|\s*Unpadded Tokens\s*\|\s*Padded Tokens\s*\|\s*Num Paddings\s*\|\s*Runtime Mode\s*\|\s*Count\s*\|"
)
ROW = re.compile(r"\|\s*(\d{1,9})\s*\|\s*(\d{1,9})\s*\|\s*(\d{1,9})\s*\|\s*(\w+)\s*\|\s*(\d{1,12})\s*\|")

EAGER = "NONE"
"""The runtime mode of steps that ran without a graph."""


class VllmCudagraphs(StepFormat):
    """Every table in a server's log; each counts the steps since the previous one, and all are summed.

    The first engine of each process prints its own; with data parallelism the engines' steps are also summed.
    """

    name = "vllm-cudagraphs"
    title = "vLLM --cudagraph-metrics table"
    source = "vLLM 018fe84, vllm/compilation/cuda_graph.py"
    tried = 1

    def recognises(self, head: Head) -> bool:
        return HEADER.search(head.text) is not None

    def steps(self, path: str, lines: Iterator[str]) -> StepHistogram:
        counts: Counter[StepKey] = Counter()
        eager = 0
        location = Location(path)
        for line in location.counted(lines):
            match = ROW.search(line)
            if match is None:
                continue
            real, padded, more, count = (int(match[group]) for group in (1, 2, 3, 5))
            if padded != real + more:
                raise InputError(
                    f"{location}: {real} tokens and {more} paddings are not {padded}; the table is damaged"
                )
            eager += count if match[4] == EAGER else 0
            counts[StepKey("any", (real,), (padded,))] += count
        if not counts:
            raise InputError(
                f"{path}: no table of CUDA graphs has a row; start vLLM with --cudagraph-metrics, and without "
                "--disable-log-stats"
            )
        notes = (f"{eager} of {counts.total()} steps ran without a graph",) if eager else ()
        return StepHistogram(("tokens",), counts, notes=notes)
