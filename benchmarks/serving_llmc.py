"""llmc as a worker of serving.py: prompts in, and how long their answers took, whole and in the graphs alone."""

from __future__ import annotations

import sys
import time
from typing import Any

from worker import serve

from llmc.runtime.llm import BundleLLM
from llmc.runtime.sampling import SamplingParams


class Llmc:
    def __init__(self, bundle: str, threads: str) -> None:
        self.llm = BundleLLM(bundle, threads=int(threads), keep_steps=True, enable_prefix_caching=False)
        self.steps: list[Any] = []
        self._run = self.llm.executor.run

    def warm(self) -> dict:
        self.llm.executor.open_all()
        return {"sequences": self.llm.bundle.plan.limits.max_num_seqs}

    def generate(self, prompts: list[list[int]], tokens: int) -> dict:
        """`execute_s` is the sum over the steps of what their graphs took."""
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        start = time.perf_counter()
        outputs = self.llm.generate(list(prompts), params, use_tqdm=False)
        took = time.perf_counter() - start
        return {
            "seconds": took,
            "tokens": sum(len(o.outputs[0].token_ids) for o in outputs),
            "execute_s": sum(r.execute_s for r in self.llm.records),
            "steps": len(self.llm.records),
            "compilations": self.llm.compilations,
        }

    def record(self, prompts: list[list[int]], tokens: int) -> dict:
        """Generate, and keep the steps that ran, for `bare`."""
        self.steps.clear()

        def kept(step: Any) -> Any:
            self.steps.append(step)
            return self._run(step)

        self.llm.executor.run = kept  # type: ignore[method-assign]
        try:
            return self.generate(prompts, tokens)
        finally:
            del self.llm.executor.run

    def bare(self) -> dict:
        """The recorded steps again, one after the other, with no engine around them."""
        start = time.perf_counter()
        for step in self.steps:
            self._run(step)
        return {"seconds": time.perf_counter() - start, "steps": len(self.steps)}


if __name__ == "__main__":
    serve(Llmc(*sys.argv[1:]))
