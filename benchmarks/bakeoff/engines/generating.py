"""Other servers' engines, told to answer whole prompts: seconds of a step are the difference between two lengths.

vLLM: vllm-project/vllm, vllm/entrypoints/llm.py at 0012cf6. SGLang: sgl-project/sglang,
python/sglang/srt/entrypoints/engine.py at 001067f. Neither is asked for text, so that no tokenizer is needed. Prefixes
are not reused.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bakeoff.engines import caches


def _vllm(model: str, sequences: int, length: int, share: float) -> Any:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=length, max_num_seqs=sequences,
        gpu_memory_utilization=share, enable_prefix_caching=False,
    )  # fmt: skip

    def generate(prompts: list[list[int]], tokens: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return generate


def _sglang(model: str, sequences: int, length: int, share: float) -> Any:
    import sglang

    engine = sglang.Engine(
        model_path=model, skip_tokenizer_init=True, dtype="bfloat16", context_length=length,
        max_running_requests=sequences, mem_fraction_static=share, disable_radix_cache=True,
    )  # fmt: skip

    def generate(prompts: list[list[int]], tokens: int) -> list[int]:
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        outputs = engine.generate(input_ids=prompts, sampling_params=params)
        return [len(output["output_ids"]) for output in outputs]

    return generate


OPENED = {"vllm": _vllm, "sglang": _sglang}


class Engine:
    def __init__(
        self, model: str, threads: int, server: str, batches: list[int], length: int, share: float,
        caches_in: str | None = None,
    ) -> None:  # fmt: skip
        caches.use(caches_in)
        self._server, self._batches = server, batches
        self._generate = OPENED[server](model, max(batches), length, share)

    def about(self) -> dict[str, Any]:
        from importlib.metadata import version

        return {"versions": {name: version(name) for name in (self._server, "torch")}}

    def warm(self) -> dict[str, Any]:
        for batch in self._batches:
            self._seconds([[1, 2, 3]] * batch, 3)
        return {}

    def _seconds(self, prompts: list[list[int]], tokens: int) -> float:
        began = time.perf_counter()
        built = self._generate(prompts, tokens)
        took = time.perf_counter() - began
        if built != [tokens] * len(prompts):
            raise ValueError(f"{self._server} made {built} tokens where {tokens} each were asked for")
        return took

    def decode(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        """Seconds of a step, the mean: what `steps` further tokens of the same prompts took."""
        first, whole = self._seconds(prompts, 1), self._seconds(prompts, 1 + steps)
        return {"steps": [(whole - first) / steps]}

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Seconds to one token."""
        return {"seconds": self._seconds([prompt], 1)}
