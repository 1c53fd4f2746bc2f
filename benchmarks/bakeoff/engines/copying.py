"""The memory roofline as an engine: moves as many bytes as a decode step has to read, with the card's own copy.

A copy reads and writes: half of the bytes are read, and as many written. On a CPU it is numpy's, on one thread.
"""

from __future__ import annotations

import time
from typing import Any


class Engine:
    def __init__(self, model: str, threads: int, device: str, weight_bytes: int, kv_bytes: int, most: int) -> None:
        self._weights, self._kv = weight_bytes, kv_bytes
        half = most // 2
        if device == "cpu":
            import numpy as np

            self._from, self._to = np.ones(half, np.uint8), np.zeros(half, np.uint8)
            self._wait = lambda: None
        else:
            import torch

            self._from = torch.ones(half, dtype=torch.uint8, device=device)
            self._to = torch.zeros_like(self._from)
            self._wait = torch.cuda.synchronize

    def about(self) -> dict[str, Any]:
        return {"versions": {}}

    def warm(self) -> dict[str, Any]:
        self.decode([[0]], 2)
        return {}

    def decode(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        """Seconds to move what each step reads; rows have all tokens up to the step's."""
        times = []
        for step in range(steps):
            half = (self._weights + sum(len(p) + step for p in prompts) * self._kv) // 2
            self._wait()
            began = time.perf_counter()
            self._copy(half)
            self._wait()
            times.append(time.perf_counter() - began)
        return {"steps": times}

    def _copy(self, half: int) -> None:
        if hasattr(self._to, "copy_"):
            self._to[:half].copy_(self._from[:half])
        else:
            self._to[:half] = self._from[:half]
