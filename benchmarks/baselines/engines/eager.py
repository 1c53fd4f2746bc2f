"""transformers in eager PyTorch as an engine: a Hugging Face folder; in float32 also the reference of quality."""

from __future__ import annotations

import inspect
import time
import warnings
from importlib import import_module
from typing import Any

torch: Any = import_module("torch")
transformers: Any = import_module("transformers")


class Engine:
    """Answers for one folder; see __init__.py."""

    def __init__(self, model: str, threads: int, dtype: str = "float32") -> None:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        warnings.simplefilter("ignore")
        self.folder = model
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        # models of Mamba layers alone have another name for their cache
        names = inspect.signature(self.model.forward).parameters
        self.cache = next(name for name in ("past_key_values", "cache_params") if name in names)

    def about(self) -> dict[str, Any]:
        """Its version, and torch's."""
        return {"versions": {"transformers": transformers.__version__, "torch": torch.__version__}}

    def warm(self) -> dict[str, Any]:
        """Nothing to do."""
        return {}

    def _step(self, ids: Any, past: Any) -> tuple[Any, Any]:
        out = self.model(input_ids=ids, **{self.cache: past}, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True), out[self.cache]

    def first_token(self, question: str) -> dict[str, Any]:
        """The first text of the answer to a question, in the model's chat form."""
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder)
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        found: list[int] = []
        past, text = None, ""
        while not text and len(found) < 16:
            ids, past = self._step(ids, past)
            found.append(int(ids[0, 0]))
            text = tokenizer.decode(found).strip("\ufffd")
        return {"text": text}

    def decode(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        """Seconds of each decode step."""
        ids, past = self._step(torch.tensor(prompts), None)
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            ids, past = self._step(ids, past)
            times.append(time.perf_counter() - start)
        return {"steps": times}

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Seconds from a prompt to its first token."""
        start = time.perf_counter()
        int(self._step(torch.tensor([prompt]), None)[0])
        return {"seconds": time.perf_counter() - start}

    def streams(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Seconds of all answers, and their tokens."""
        start = time.perf_counter()
        ids, past = self._step(torch.tensor(prompts), None)
        for _ in range(tokens - 1):
            ids, past = self._step(ids, past)
        return {"seconds": time.perf_counter() - start, "tokens": tokens * len(prompts)}

    def logits(self, texts: list[list[int]], file: str) -> dict[str, Any]:
        """Logits after every token of every text, one after the other; float32 into a .npy file."""
        import numpy as np

        rows = [self.model(input_ids=torch.tensor([text]), use_cache=False).logits[0].float().numpy() for text in texts]
        np.save(file, np.concatenate(rows).astype(np.float32))
        return {}
