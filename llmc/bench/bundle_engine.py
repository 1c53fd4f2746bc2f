"""A bundle as a measured engine, for any device; launch.py runs it in its own process.

Prefix caching is off, so every prompt is computed. Answers are greedy and continue after the end token.
"""

from __future__ import annotations

import time
from typing import Any

from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.llm import BundleLLM


class Engine:
    """Runs one bundle; prompts are token ids. `options` are passed to BundleLLM."""

    def __init__(self, model: str, threads: int, **options: Any) -> None:
        self.llm = BundleLLM(model, threads=threads, keep_steps=True, enable_prefix_caching=False, **options)

    def about(self) -> dict[str, Any]:
        """The bundle's limits, and what it was compiled with."""
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
        """Open every executable, so that none opens during a measurement."""
        self.llm.executor.open_all()
        return {}

    def first_token(self, question: str) -> dict[str, Any]:
        """The first text of the answer to a question, in the model's chat template."""
        params = SamplingParams(max_tokens=16, temperature=0)
        for _, update, _ in self.llm.stream([{"messages": [{"role": "user", "content": question}]}], params):
            if update.text:
                return {"text": update.text}
        return {"text": ""}

    def decode(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        """Time each decode step in seconds; `execute` is the graphs' share."""
        params = SamplingParams(max_tokens=steps + 1, temperature=0, ignore_eos=True)
        times, began, seen = [], 0.0, [0] * len(prompts)
        for index, update, _ in self.llm.stream(prompts, params):
            seen[index] += len(update.token_ids)
            if index != len(prompts) - 1:
                continue
            now = time.perf_counter()
            if min(seen) > 1:  # only full decode steps
                times.append(now - began)
            began = now
        whole = [r for r in self.llm.records if r.phase == "decode" and r.live_rows == r.live_tokens == len(prompts)]
        return {"steps": times, "execute": [r.execute_s for r in whole]}

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Time from a prompt to its first token, in seconds."""
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        start = time.perf_counter()
        for _ in self.llm.stream([prompt], params):
            pass
        return {"seconds": time.perf_counter() - start}

    def streams(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Time all answers at once in seconds, and count their tokens; `execute_s` is the graphs' share."""
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        start = time.perf_counter()
        outputs = self.llm.generate(list(prompts), params, use_tqdm=False)
        took = time.perf_counter() - start
        return {
            "seconds": took,
            "tokens": sum(len(o.outputs[0].token_ids) for o in outputs),
            "execute_s": sum(r.execute_s for r in self.llm.records),
            "compilations": self.llm.compilations,
        }
