"""openvino-genai's continuous batching as a worker of serving.py; runs in the peers' environment."""

from __future__ import annotations

import sys
import time

import numpy as np
import openvino as ov
import openvino_genai as ovg
from worker import serve


class OpenVino:
    def __init__(self, gguf: str, threads: str) -> None:
        scheduler = ovg.SchedulerConfig()
        scheduler.max_num_batched_tokens = 512
        scheduler.max_num_seqs = 8
        scheduler.cache_size = 1  # GiB
        scheduler.enable_prefix_caching = False
        self.pipe = ovg.ContinuousBatchingPipeline(gguf, scheduler, "CPU", {"INFERENCE_NUM_THREADS": int(threads)})
        self.next = 0

    def warm(self) -> dict:
        return {}

    def generate(self, prompts: list[list[int]], tokens: int) -> dict:
        config = ovg.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        start = time.perf_counter()
        handles = []
        for prompt in prompts:
            self.next += 1
            handles.append(self.pipe.add_request(self.next, ov.Tensor(np.array([prompt], np.int64)), config))
        while self.pipe.has_non_finished_requests():
            self.pipe.step()
        took = time.perf_counter() - start
        return {"seconds": took, "tokens": sum(len(h.read_all()[0].generated_ids) for h in handles)}


if __name__ == "__main__":
    serve(OpenVino(*sys.argv[1:]))
