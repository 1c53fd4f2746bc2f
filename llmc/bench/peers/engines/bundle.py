"""llmc as an engine: a bundle, whatever it was compiled for. The contract is in __init__.py.

Prefix caching is off: every prompt is computed, as by the peers.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from llmc.runtime.engine.requests import Request
from llmc.runtime.engine.sampling import SamplingParams
from llmc.runtime.llm import BundleLLM


class Engine:
    """Answers for one bundle; see __init__.py. `options`: more of BundleLLM's."""

    def __init__(self, model: str, threads: int, **options: Any) -> None:
        self.llm = BundleLLM(model, threads=threads, keep_steps=True, enable_prefix_caching=False, **options)
        self._recorded: list[Any] = []

    def about(self) -> dict[str, Any]:
        """Limits of the bundle, and what it was made with."""
        manifest, limits = self.llm.bundle.manifest, self.llm.bundle.plan.limits
        return {
            "versions": {"llmc": manifest.llmc, **manifest.toolchain},
            "device": manifest.device,
            "quantize": manifest.options.get("quantize"),
            "sequences": limits.max_num_seqs,
            "prompt": limits.longest_prompt,
            "length": limits.max_model_len,
            "vocabulary": int(manifest.model["vocab_size"]),
        }

    def warm(self) -> dict[str, Any]:
        """Open every executable, so that none opens in the background of a measurement."""
        self.llm.executor.open_all()
        return {}

    def first_token(self, question: str) -> dict[str, Any]:
        """The first text of the answer to a question, in the model's chat form."""
        params = SamplingParams(max_tokens=16, temperature=0)
        for _, update, _ in self.llm.stream([{"messages": [{"role": "user", "content": question}]}], params):
            if update.text:
                return {"text": update.text}
        return {"text": ""}

    def decode(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        """Seconds of each decode step; `execute` is the part that the graphs took."""
        params = SamplingParams(max_tokens=steps + 1, temperature=0, ignore_eos=True)
        times, began, seen = [], 0.0, [0] * len(prompts)
        for index, update, _ in self.llm.stream(prompts, params):
            seen[index] += len(update.token_ids)
            if index != len(prompts) - 1:
                continue
            now = time.perf_counter()
            if min(seen) > 1:  # only steps with all rows and without a prompt
                times.append(now - began)
            began = now
        whole = [r for r in self.llm.records if r.phase == "decode" and r.live_rows == r.live_tokens == len(prompts)]
        return {"steps": times, "execute": [r.execute_s for r in whole]}

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Seconds from a prompt to its first token."""
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        start = time.perf_counter()
        for _ in self.llm.stream([prompt], params):
            pass
        return {"seconds": time.perf_counter() - start}

    def streams(self, prompts: list[list[int]], tokens: int, replay: bool = False) -> dict[str, Any]:
        """Seconds of all answers, and their tokens.

        With `replay` also `bare_s`: the same steps once more, one after the other, with no engine around them.
        """
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        start = time.perf_counter()
        outputs = self.llm.generate(list(prompts), params, use_tqdm=False)
        took = time.perf_counter() - start
        answer = {
            "seconds": took,
            "tokens": sum(len(o.outputs[0].token_ids) for o in outputs),
            "execute_s": sum(r.execute_s for r in self.llm.records),
            "compilations": self.llm.compilations,
        }
        return answer | {"bare_s": self._replayed(prompts, params)} if replay else answer

    def _replayed(self, prompts: list[list[int]], params: SamplingParams) -> float:
        run, steps = self.llm.executor.run, []

        def kept(step: Any) -> Any:
            steps.append(step)
            return run(step)

        self.llm.executor.run = kept  # type: ignore[method-assign]
        try:
            self.llm.generate(list(prompts), params, use_tqdm=False)
        finally:
            del self.llm.executor.run  # restores the method of the class
        start = time.perf_counter()
        for step in steps:
            run(step)
        return time.perf_counter() - start

    def serve(self, prompts: list[list[int]], tokens: list[int], concurrency: int) -> dict[str, Any]:
        """A closed loop of `concurrency` requests at a time; seconds since its start of each sending and token."""
        engine, waiting = self.llm.engine, deque(range(len(prompts)))
        sent = [0.0] * len(prompts)
        times: list[list[float]] = [[] for _ in prompts]
        running, start = 0, time.perf_counter()
        while waiting or running:
            while waiting and running < concurrency:
                at = waiting.popleft()
                params = SamplingParams(max_tokens=tokens[at], temperature=0, ignore_eos=True)
                sent[at] = time.perf_counter() - start
                engine.add(engine.prepare(Request(str(at), prompts[at], params)))
                running += 1
            updates = engine.step()
            now = time.perf_counter() - start
            for update in updates:
                times[int(update.request_id)] += [now] * len(update.token_ids)
                running -= update.finish_reason is not None
        return {"seconds": time.perf_counter() - start, "sent": sent, "times": times}

    def logits(self, texts: list[list[int]], file: str) -> dict[str, Any]:
        """Logits after every token of every text, one after the other, as decode steps; float32 into a .npy file."""
        import numpy as np

        from llmc.runtime.step import exact, pad

        executor, rows = self.llm.executor, []
        for text in texts:
            for at, token in enumerate(text):
                bucket = None if executor.exact else self.llm.bundle.plan.lookup("decode", 1, 1, at)
                if bucket is not None:
                    step = pad(bucket, [0], [[token]], [at])
                else:
                    step = exact("decode", [0], [[token]], [at])
                rows.append(executor.run(step)[0].copy())
            executor.copy_prefix(0, 0, 0)
        np.save(file, np.array(rows, np.float32))
        return {}
