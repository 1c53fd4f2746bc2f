"""An engine that answers at once, in whichever way its model's name says; run by launch.py, as a real one.

FAKE_ENGINE has options of every one, as JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


class Engine:
    def __init__(self, model: str, threads: int, vocabulary: int = 5, step_ms: float = 2.0, **options: Any) -> None:
        model = os.path.basename(model)  # noqa: PTH119 - a name or a path
        if model == "does-not-open":
            raise OSError("no such model")
        print("noise on stdout")
        print("a complaint", file=sys.stderr)
        options = {**json.loads(os.environ.get("FAKE_ENGINE", "{}")), **options}
        self.model, self.threads, self.options = model, threads, options
        self.vocabulary, self.step_s = vocabulary, step_ms / 1e3
        self.slower = options.get("slower", 1)

    def _interrupt(self, rows: int) -> None:
        """Send its owner the signal that the options name, when asked for so many rows, and be busy for long."""
        if (requested := self.options.get("interrupts")) and rows >= requested["rows"]:
            os.kill(os.getppid(), requested["signal"])
            time.sleep(600)

    def about(self) -> dict[str, Any]:
        limits = {"sequences": 4, "prompt": 600, "length": 700} if self.model == "small" else {}
        return {"versions": {"fake": "1"}, **limits}

    def warm(self) -> dict[str, Any]:
        return {}

    def first_token(self, question: str) -> dict[str, Any]:
        return {"text": "" if self.model == "silent" else "Well", "after_s": 0.0}

    def decode(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        self._interrupt(len(prompts))
        if self.model == "dies":
            os._exit(7)
        if self.model == "refuses":
            raise ValueError(f"no batch of {len(prompts)}")
        return {"steps": [self.step_s * len(prompts)] * steps, "execute": [self.step_s * len(prompts) * 0.9] * steps}

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        return {"seconds": len(prompt) * 1e-3 * self.slower}

    def streams(self, prompts: list[list[int]], tokens: int, replay: bool = False) -> dict[str, Any]:
        ours = {"execute_s": 0.9, "bare_s": 0.8} if replay else {}
        return {"seconds": float(self.slower), "tokens": tokens * len(prompts), **ours}

    def serve(self, prompts: list[list[int]], tokens: list[int], concurrency: int) -> dict[str, Any]:
        times = [[0.5 + 0.01 * i for i in range(count)] for count in tokens]
        return {"seconds": 2.0, "sent": [0.1] * len(prompts), "times": times}

    def logits(self, texts: list[list[int]], file: str) -> dict[str, Any]:
        import numpy as np

        rows = np.arange(sum(map(len, texts)))[:, None] * 0.1 + np.arange(self.vocabulary)[None]
        rows = np.sin(rows * 7) * 3
        if self.model == "small":
            rows = rows + np.random.default_rng(0).normal(0, 0.01, rows.shape)
        np.save(file, rows.astype(np.float32))
        return {}
