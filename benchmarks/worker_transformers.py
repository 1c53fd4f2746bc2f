"""transformers in eager PyTorch, float32, as a benchmark worker (see harness.py): the model of llmc's reference."""

from __future__ import annotations

import sys
import time

import torch
from transformers import DynamicCache
from worker import serve

from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.frontend.skeleton import load_real_model


class Transformers:
    def __init__(self, model: str, threads: str) -> None:
        torch.set_num_threads(int(threads))
        self.model = load_real_model(open_checkpoint(model))

    @torch.inference_mode()
    def decode(self, batch: int, prompt: list[int], steps: int) -> dict:
        """Seconds of each decode step of `batch` equal-length prompts."""
        cache = DynamicCache(config=self.model.config)
        ids = torch.tensor([prompt[i:] + prompt[:i] for i in range(batch)])
        times = []
        for _ in range(steps + 1):
            start = time.perf_counter()
            logits = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)
            times.append(time.perf_counter() - start)
        return {"steps": times[1:]}

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> dict:
        start = time.perf_counter()
        self.model(input_ids=torch.tensor([prompt]), use_cache=True, logits_to_keep=1).logits.argmax(-1)
        return {"seconds": time.perf_counter() - start}


if __name__ == "__main__":
    serve(Transformers(*sys.argv[1:]))
