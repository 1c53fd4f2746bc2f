"""llmc as a benchmark worker: JSON requests on stdin, JSON answers on stdout (see harness.py)."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from worker import serve

from llmc.runtime.llm import BundleLLM
from llmc.runtime.sampling import SamplingParams


class Llmc:
    def __init__(self, bundle: str, threads: str) -> None:
        self.llm = BundleLLM(bundle, threads=int(threads), keep_steps=True)

    def warm(self) -> None:
        """Open every executable, so that background opening does not run beside the measurements."""
        self.llm.executor.open_all()

    def decode(self, batch: int, prompt: list[int], steps: int) -> dict:
        """Seconds of each decode step of `batch` equal-length prompts, and the part outside the graph."""
        params = SamplingParams(max_tokens=steps + 1, temperature=0, ignore_eos=True)
        prompts = [prompt[i:] + prompt[:i] for i in range(batch)]
        times, last = [], None
        for index, _, _ in self.llm.stream(prompts, params):
            if index == batch - 1:
                now = time.perf_counter()
                if last is not None:
                    times.append(now - last)
                last = now
        records = [r for r in self.llm.records if r.phase == "decode"]
        return {"steps": times, "execute": [r.execute_s for r in records]}

    def prefill(self, prompt: list[int]) -> dict:
        start = time.perf_counter()
        next(iter(self.llm.stream([prompt], SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))))
        return {"seconds": time.perf_counter() - start}

    def logits(self, tokens: list[int]) -> dict:
        """Teacher-forced logits after each token, as raw float32 in a file."""
        from llmc.runtime.step import exact, pad

        executor, rows = self.llm.executor, []
        for i, token in enumerate(tokens):
            if executor.exact:
                step = exact("decode", [0], [[token]], [i])
            else:
                step = pad(self.llm.bundle.plan.lookup("decode", 1, 1, i), [0], [[token]], [i])
            rows.append(executor.run(step)[0].copy())
        path = f"/tmp/llmc-logits-{time.time_ns()}.npy"
        np.save(path, np.array(rows))
        return {"file": path}

    def memory(self) -> dict:
        rollup = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
        return {"pss_kib": int(rollup["Pss"].split()[0])}


if __name__ == "__main__":
    serve(Llmc(*sys.argv[1:]))
