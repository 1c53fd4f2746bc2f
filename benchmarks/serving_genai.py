"""onnxruntime-genai's batch generator as a worker of serving.py; runs in the peers' environment.

The prompts are equally long, so that its static batch has no padding and no row that ends early.
"""

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

    def warm(self) -> dict:
        return {}

    def generate(self, prompts: list[list[int]], tokens: int) -> dict:
        length = len(prompts[0]) + tokens
        params = og.GeneratorParams(self.model)
        params.set_search_options(batch_size=len(prompts), max_length=length, min_length=length, do_sample=False)
        start = time.perf_counter()
        generator = og.Generator(self.model, params)
        generator.append_tokens(np.array(prompts, np.int32))
        count = 0
        while count < tokens and not generator.is_done():
            generator.generate_next_token()
            count += 1
        return {"seconds": time.perf_counter() - start, "tokens": count * len(prompts)}


if __name__ == "__main__":
    serve(Genai(*sys.argv[1:]))
