"""onnxruntime-genai as a benchmark worker; runs in the peers' environment."""

from __future__ import annotations

import sys
import time

import numpy as np
import onnxruntime_genai as og
from worker import serve


class Genai:
    def __init__(self, folder: str, threads: str) -> None:
        config = og.Config(folder)
        config.overlay(
            '{"model": {"decoder": {"session_options": {"intra_op_num_threads": %s}}}}' % threads  # noqa: UP031
        )
        self.model = og.Model(config)

    def _generator(self, batch: int, length: int) -> og.Generator:
        params = og.GeneratorParams(self.model)
        params.set_search_options(batch_size=batch, max_length=length, min_length=length, do_sample=False)
        return og.Generator(self.model, params)

    def warm(self) -> None:
        return None

    def decode(self, batch: int, prompt: list[int], steps: int) -> dict:
        generator = self._generator(batch, len(prompt) + steps + 1)
        prompts = np.array([prompt[i:] + prompt[:i] for i in range(batch)], np.int32)
        generator.append_tokens(prompts if batch > 1 else prompts[0])
        generator.generate_next_token()
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            generator.generate_next_token()
            times.append(time.perf_counter() - start)
        return {"steps": times}

    def prefill(self, prompt: list[int]) -> dict:
        generator = self._generator(1, len(prompt) + 2)
        start = time.perf_counter()
        generator.append_tokens(np.array(prompt, np.int32))
        generator.generate_next_token()
        return {"seconds": time.perf_counter() - start}

    def logits(self, tokens: list[int]) -> dict:
        generator = self._generator(1, len(tokens) + 2)
        rows = []
        for token in tokens:
            generator.append_tokens(np.array([token], np.int32))
            rows.append(np.asarray(generator.get_output("logits"))[0, -1].copy())
        path = f"/tmp/genai-logits-{time.time_ns()}.npy"
        np.save(path, np.array(rows))
        return {"file": path}


if __name__ == "__main__":
    serve(Genai(*sys.argv[1:]))
