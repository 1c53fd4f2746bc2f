"""vLLM's request log: the token ids that it prints of prompts and outputs are counted, and never kept."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from llmc.buckets.traffic.formats.base import Fields, Found, FoundRows, Head, Place, RequestFormat
from llmc.buckets.traffic.formats.server_log import LogClock
from llmc.buckets.traffic.rows import Rows
from llmc.buckets.traffic.timestamps import Moment
from llmc.errors import InputError

RECEIVED = re.compile(r"\b(?:Received request (\S+): |Request (\S+) details: prompt: )")
GENERATED = re.compile(r"\bGenerated response (\S+?)( \(streaming (?:delta|complete)\))?: output: ")
DELTA = " (streaming delta)"
PROMPT_IDS = ", prompt_token_ids: "
OUTPUT_IDS = ", output_token_ids: "
PROMPT_TEXT = re.compile(r"\bprompt: ('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")")
OUTPUT_TEXT = re.compile(r"\boutput: ('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")")

ESCAPE = re.compile(r"\\(?:x..|u.{4}|U.{8}|.)")
"""One character of a text as Python's repr escapes it."""

WAITING, ANSWERED = 1 << 16, 1 << 10
"""Requests that are remembered until they are answered, and then for further answers; the oldest are forgotten."""

REMEDY = "start vLLM with --enable-log-requests --enable-log-outputs and VLLM_LOGGING_LEVEL=DEBUG"


@dataclass
class _Request:
    arrived: Moment | None
    prompt: int = 0
    streamed: int = 0
    answers: int = 0


class VllmRequests(RequestFormat):
    """Lines "Received request …" and "Generated response …" of a server's log, among any others.

    A request counts when it is answered, and arrived when it was received. In older versions the first line has the
    prompt's token ids, later a line "Request … details" at DEBUG. Of a streamed answer the deltas are counted. Several
    answers to one prompt are as many requests, whose prompt is cached for all but the first. Times are seconds without
    a year.
    """

    name = "vllm-requests"
    title = "vLLM request log"
    source = "vLLM, vllm/entrypoints/logger.py at 01ff126 (ids in one line) and 63c2b7a (ids at DEBUG)"

    def recognises(self, head: Head) -> bool:
        """Whether a line tells of a request, with lengths or without."""
        return RECEIVED.search(head.text) is not None or GENERATED.search(head.text) is not None

    def rows(self, path: str, lines: Iterator[str], fields: Fields) -> Rows:
        """The rows. Raises InputError too for a log without lengths, and for one that cuts them (--max-log-len)."""
        place = Place(path)
        return FoundRows(place, _Log(place).read(lines))


class _Log:
    def __init__(self, place: Place) -> None:
        self._place = place
        self._clock = LogClock()
        self._waiting: OrderedDict[str, _Request] = OrderedDict()
        self._answered: OrderedDict[str, _Request] = OrderedDict()
        self._longest = 0
        self._cut = 0
        self.received = self.answered = self.without = self.forgotten = 0
        place.notes = self._notes

    def read(self, lines: Iterator[str]) -> Iterator[Found]:
        for line in self._place.counted(lines):
            if match := RECEIVED.search(line):
                self._received(line, match[1] or match[2])
            elif match := GENERATED.search(line):
                found = self._generated(line, match)
                if found is not None:
                    self.answered += 1
                    yield found
        if self._cut > 1:
            raise InputError(
                f"{self._place.path}: the lengths are cut: {self._cut} texts of {self._longest} characters have "
                f"{self._longest} tokens, as --max-log-len {self._longest} leaves of longer ones; {REMEDY}, and "
                "without --max-log-len"
            )
        if not self.answered:
            raise InputError(
                f"{self._place.path}: the log has no lengths: {self.received} requests received, none of them with the "
                f"token ids of prompt and output; {REMEDY}, or read the server's /metrics in its place"
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
            self.without += match[2] != DELTA
            return None
        ids = _ids(line, OUTPUT_IDS)
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
        """Whether text and ids are cut to the same number, as --max-log-len does; that shows at the longest ones."""
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
    """How many token ids are listed after the last `before`; text that a user wrote stands in front of it."""
    start = line.rfind(before)
    if start < 0:
        return 0
    start += len(before)
    end = line.find("]", start)
    return 0 if line[start : start + 1] != "[" or end <= start + 1 else line.count(",", start, end) + 1
