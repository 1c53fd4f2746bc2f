"""transformers in bfloat16 over a static cache, as an engine: eager, or with torch.compile(mode="reduce-overhead").

The loop is as lean as it can be: a forward, the largest logit, and its token on the host, as a server needs it. Each
batch size is compiled by itself, with fixed shapes; `warm` does so. Prompts run eagerly in both.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bakeoff.engines import caches


class Engine:
    def __init__(
        self, model: str, threads: int, device: str, compiled: bool, batches: list[int], length: int,
        caches_in: str | None = None,
    ) -> None:  # fmt: skip
        caches.use(caches_in)
        import torch
        import transformers

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self._torch, self._transformers, self._device = torch, transformers, device
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(device).eval()
        self._step = self._next
        if compiled:
            self._step = torch.compile(self._next, mode="reduce-overhead", dynamic=False)
        self._batches, self._length = batches, length
        self._caches: dict[int, Any] = {}

    def about(self) -> dict[str, Any]:
        return {"versions": {"transformers": self._transformers.__version__, "torch": self._torch.__version__}}

    def warm(self) -> dict[str, Any]:
        """Compile, or run first, each batch size: CUDA graphs are recorded in the second run, and replayed later."""
        for batch in self._batches:
            self.decode([[1, 2, 3]] * batch, 3)
        return {}

    def _next(self, ids: Any, at: Any, cache: Any) -> Any:
        out = self._model(input_ids=ids, position_ids=at, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True)

    def _prompts(self, prompts: list[list[int]]) -> tuple[Any, Any, Any]:
        """Run them; their next tokens, the positions of these, and the cache."""
        cache = self._caches.get(len(prompts))
        if cache is None:
            cache = self._transformers.StaticCache(config=self._model.config, max_cache_len=self._length)
            self._caches[len(prompts)] = cache
        cache.reset()
        ids = self._torch.tensor(prompts, device=self._device)
        at = self._torch.arange(ids.shape[1], device=self._device).expand(ids.shape)
        return self._next(ids, at, cache), at[:, -1:] + 1, cache

    def decode(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        """Seconds of each step, its tokens on the host."""
        ids, at, cache = self._prompts(prompts)
        times = []
        ids.tolist()
        for _ in range(steps):
            began = time.perf_counter()
            if self._device != "cpu":
                self._torch.compiler.cudagraph_mark_step_begin()
            ids = self._step(ids, at, cache).clone()
            ids.tolist()
            times.append(time.perf_counter() - began)
            at = at + 1
        return {"steps": times}

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Seconds to the first token on the host."""
        began = time.perf_counter()
        self._prompts([prompt])[0].tolist()
        return {"seconds": time.perf_counter() - began}
