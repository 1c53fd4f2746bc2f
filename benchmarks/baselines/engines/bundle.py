"""llmc as an engine: a bundle, whatever it was compiled for. The contract is in __init__.py."""

from __future__ import annotations

import runpy
import time
from collections import deque
from pathlib import Path
from typing import Any

from llmc.runtime.engine.requests import Request
from llmc.runtime.engine.sampling.params import SamplingParams

MEASURED: Any = runpy.run_path(str(Path(__file__).parents[3] / "llmc" / "bench" / "bundle_engine.py"))["Engine"]
"""Of this tree, also where before_after.py measures another version of llmc."""


class Engine(MEASURED):
    """Answers for one bundle; see __init__.py."""

    def streams(self, prompts: list[list[int]], tokens: int, replay: bool = False) -> dict[str, Any]:
        """Seconds of all answers, and their tokens.

        With `replay` also `bare_s`: the same steps once more, one after the other, with no engine around them.
        """
        answer = super().streams(prompts, tokens)
        return answer | {"bare_s": self._replayed(prompts, tokens)} if replay else answer

    def _replayed(self, prompts: list[list[int]], tokens: int) -> float:
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
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
                bucket = None if executor.capabilities.exact else self.llm.bundle.plan.lookup("decode", 1, 1, at)
                if bucket is not None:
                    step = pad(bucket, [0], [[token]], [at])
                else:
                    step = exact("decode", [0], [[token]], [at])
                rows.append(executor.run(step)[0].copy())
            executor.copy_prefix(0, 0, 0)
        np.save(file, np.array(rows, np.float32))
        return {}
