"""openvino-genai as an engine: a folder with its IR and tokenizers, or a GGUF file.

`attention` "paged" is its ContinuousBatchingPipeline, "sdpa" its LLMPipeline over a stateful model. Prefix caching is
off. A compiled model is kept in `cache`, which only the second way can make use of.
"""

from __future__ import annotations

import time
from collections import deque
from importlib import import_module
from itertools import pairwise
from typing import Any

ov: Any = import_module("openvino")
ovg: Any = import_module("openvino_genai")


class Engine:
    """Answers for one model; see __init__.py. `batched_tokens`: of one step of the scheduler; None: its default."""

    def __init__(
        self, model: str, threads: int, attention: str = "paged", sequences: int = 256,
        batched_tokens: int | None = None, cache: str | None = None,
    ) -> None:  # fmt: skip
        self.model, self.threads = model, threads
        how: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads} | ({"CACHE_DIR": cache} if cache else {})
        self.numbers = 0
        self.paged: Any = None
        self.pipe: Any = None
        if attention == "paged":
            scheduler = ovg.SchedulerConfig()
            scheduler.enable_prefix_caching = False
            scheduler.max_num_seqs = sequences
            if batched_tokens is not None:
                scheduler.max_num_batched_tokens = batched_tokens
            self.paged = ovg.ContinuousBatchingPipeline(model, scheduler, "CPU", how)
        else:
            self.pipe = ovg.LLMPipeline(model, "CPU", ATTENTION_BACKEND="SDPA", **how)

    def about(self) -> dict[str, Any]:
        """Its version."""
        return {"versions": {"openvino-genai": ovg.__version__.split("-")[0]}}

    def warm(self) -> dict[str, Any]:
        """Nothing to do."""
        return {}

    def first_token(self, question: str) -> dict[str, Any]:
        """The first text of the answer to a question; both pipelines apply the model's chat form.

        `after_s`: seconds that the pipeline took to come to an end after that text.
        """
        found: list[tuple[str, float]] = []

        def take(text: str) -> bool:
            if text:
                found.append((text, time.perf_counter()))
            return bool(text)  # enough

        config = ovg.GenerationConfig(max_new_tokens=16, do_sample=False)
        (self.paged or self.pipe).generate(question, config, take)
        text, when = found[0] if found else ("", time.perf_counter())
        return {"text": text, "after_s": time.perf_counter() - when}

    def _add(self, prompt: list[int], tokens: int) -> Any:
        import numpy as np

        self.numbers += 1
        return self.paged.add_request(self.numbers, ov.Tensor(np.array([prompt], np.int64)), _greedy(tokens))

    def _generated(self, prompts: list[list[int]], tokens: int) -> Any:
        import numpy as np

        ids = np.array(prompts, np.int64)
        return self.pipe.generate(ovg.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids))), _greedy(tokens))

    def decode(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        """Seconds of each decode step."""
        if self.pipe is not None:
            moments = list(self._generated(prompts, steps + 2).perf_metrics.raw_metrics.m_new_token_times)  # ms
            return {"steps": [(b - a) / 1e3 for a, b in pairwise(moments[1:])]}
        handles = [self._add(prompt, steps + 1) for prompt in prompts]
        counts, times = [0] * len(prompts), []
        while self.paged.has_non_finished_requests():
            whole = min(counts) > 0
            start = time.perf_counter()
            self.paged.step()
            took = time.perf_counter() - start
            if whole:
                times.append(took)
            counts = [count + _new(handle) for count, handle in zip(counts, handles, strict=True)]
        return {"steps": times}

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Seconds from a prompt to its first token."""
        start = time.perf_counter()
        if self.pipe is not None:
            self._generated([prompt], 1)
        else:
            handle = self._add(prompt, 1)  # a request without a handle is dropped
            while not handle.can_read():
                self.paged.step()
        return {"seconds": time.perf_counter() - start}

    def streams(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Seconds of all answers, and their tokens."""
        start = time.perf_counter()
        if self.pipe is not None:
            count = sum(len(row) for row in self._generated(prompts, tokens).tokens)
        else:
            handles = [self._add(prompt, tokens) for prompt in prompts]
            while self.paged.has_non_finished_requests():
                self.paged.step()
            count = sum(_new(handle) for handle in handles)
        return {"seconds": time.perf_counter() - start, "tokens": count}

    def serve(self, prompts: list[list[int]], tokens: list[int], concurrency: int) -> dict[str, Any]:
        """A closed loop of `concurrency` requests at a time; seconds since its start of each sending and token."""
        if self.paged is None:
            raise NotImplementedError("this pipeline runs one batch at a time")
        waiting, running = deque(range(len(prompts))), dict[int, Any]()
        sent = [0.0] * len(prompts)
        times: list[list[float]] = [[] for _ in prompts]
        start = time.perf_counter()
        while waiting or running:
            while waiting and len(running) < concurrency:
                at = waiting.popleft()
                sent[at] = time.perf_counter() - start
                running[at] = self._add(prompts[at], tokens[at])
            self.paged.step()
            now = time.perf_counter() - start
            for at, handle in list(running.items()):
                times[at] += [now] * _new(handle)
                if len(times[at]) >= tokens[at]:
                    del running[at]
        return {"seconds": time.perf_counter() - start, "sent": sent, "times": times}

    def logits(self, texts: list[list[int]], file: str) -> dict[str, Any]:
        """Logits after every token of every text, one after the other; float32 into a .npy file.

        Neither pipeline gives them: the same IR runs by itself, stateful, with the plugin's defaults as in both.
        """
        from pathlib import Path

        import numpy as np

        core = ov.Core()
        compiled = core.compile_model(
            Path(self.model) / "openvino_model.xml", "CPU", {"INFERENCE_NUM_THREADS": self.threads}
        )
        request, rows = compiled.create_infer_request(), []
        for text in texts:
            request.reset_state()
            for at, token in enumerate(text):
                request.infer({
                    "input_ids": np.array([[token]]), "attention_mask": np.ones((1, at + 1), np.int64),
                    "position_ids": np.array([[at]]), "beam_idx": np.zeros(1, np.int32),
                })  # fmt: skip
                rows.append(request.get_tensor("logits").data[0, -1].copy())
        np.save(file, np.array(rows, np.float32))
        return {}


def _greedy(tokens: int) -> Any:
    return ovg.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)


def _new(handle: Any) -> int:
    """Tokens that a request got since this was asked last."""
    count = 0
    while handle.can_read():
        count += len(handle.read()[0].generated_ids)
    return count
