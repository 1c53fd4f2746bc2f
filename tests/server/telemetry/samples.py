"""Steps and requests as an engine would tell of them, and an engine that really does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.batched_core import BatchedCore
from llmc.runtime.engine.engine import LLMEngine
from llmc.runtime.engine.observer import Observer, RequestSummary, StepRecord
from llmc.runtime.engine.requests import Request
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.executors import open_executor
from tests.toy import Toy


def step(phase: str = "decode", batch: int = 4, query: int = 1, context: int = 16, **more: Any) -> StepRecord:
    """A step of 3 live rows; 10 ms, of them 1 schedule, 2 pad, 6 execute and 1 sample."""
    known: dict[str, Any] = {
        "live_rows": 3, "live_tokens": 3, "padding_tokens": 1, "executable": f"{phase}.bin", "prepare_s": 0.002,
        "execute_s": 0.006, "sample_s": 0.001, "requests": (0, 1, 2), "started_s": 100.0, "schedule_s": 0.001,
    }  # fmt: skip
    return StepRecord(phase, batch, query, context, **{**known, **more})


def summary(request_id: str = "a", **more: Any) -> RequestSummary:
    """10 prompt tokens, 4 of them cached, and 5 more; 0.5 s in the queue, the first token at 1 s, 3 s in all."""
    known: dict[str, Any] = {
        "arrived_at": 1000.0, "prompt_tokens": 10, "cached_tokens": 4, "output_tokens": 5, "finish_reasons": ("stop",),
        "n": 1, "max_tokens": 7, "e2e_s": 3.0, "queue_s": 0.5, "first_token_s": 1.0, "prefill_s": 0.5, "decode_s": 2.0,
    }  # fmt: skip
    return RequestSummary(request_id, **{**known, **more})


class Kept(Observer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.summaries: list[RequestSummary] = []

    def stepped(self, record: StepRecord) -> None:
        self.steps.append(record)

    def finished(self, summary: RequestSummary) -> None:
        self.summaries.append(summary)


def toy_bundle(folder: Path) -> Bundle:
    """4 sequences of 32 tokens, an executable for each bucket."""
    toy = Toy.make(folder)
    toy.compile()
    return Bundle.open(toy.bundle)


def engine(bundle: Bundle, observer: Observer) -> LLMEngine:
    """The real engine over the fake device."""
    core = BatchedCore(bundle.plan, open_executor(bundle), int(bundle.manifest.model["vocab_size"]))
    return LLMEngine(core, bundle.tokenizer, observer=observer)


def run(built: LLMEngine, prompts: Sequence[str], cancelled: Sequence[str] = (), max_tokens: int = 6) -> None:
    """Run prompts to their ends; those whose request ids ("0", "1", …) are in `cancelled` are cut after two steps."""
    for number, prompt in enumerate(prompts):
        ids = built.tokenizer.encode(prompt) if built.tokenizer else []
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        built.add(built.prepare(Request(str(number), ids, params)))
    for _ in range(2):
        built.step()
    for request_id in cancelled:
        built.cancel(request_id)
    while built.has_work:
        built.step()
