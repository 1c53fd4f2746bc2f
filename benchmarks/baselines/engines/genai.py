"""onnxruntime-genai as an engine: a folder of its model builder, in a static batch.

Prompts of one call are equally long, so that its batch has no padding and no row that ends early.
"""

from __future__ import annotations

import json
import time
from importlib import import_module
from typing import Any

og: Any = import_module("onnxruntime_genai")


class Engine:
    """Answers for one model folder; see __init__.py.

    `chunk`: tokens of a prompt that are computed at once, `dynamic_block_base`: ONNX Runtime's option of that name; 0
    leaves either at its default.
    """

    def __init__(self, model: str, threads: int, chunk: int = 0, dynamic_block_base: int = 0) -> None:
        config = og.Config(model)
        session: dict[str, Any] = {"intra_op_num_threads": threads}
        if dynamic_block_base:
            session["session.dynamic_block_base"] = str(dynamic_block_base)
        options: dict[str, Any] = {"model": {"decoder": {"session_options": session}}}
        if chunk:
            options["search"] = {"chunk_size": chunk}
        config.overlay(json.dumps(options))
        self.model = og.Model(config)

    def about(self) -> dict[str, Any]:
        """Its version."""
        return {"versions": {"onnxruntime-genai": og.__version__}}

    def warm(self) -> dict[str, Any]:
        """Nothing to do."""
        return {}

    def _generator(self, batch: int, length: int) -> Any:
        params = og.GeneratorParams(self.model)
        params.set_search_options(batch_size=batch, max_length=length, min_length=length, do_sample=False)
        return og.Generator(self.model, params)

    def first_token(self, question: str) -> dict[str, Any]:
        """The first text of the answer to a question, in the model's chat form."""
        tokenizer = og.Tokenizer(self.model)
        messages = json.dumps([{"role": "user", "content": question}])
        tokens = tokenizer.encode(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
        params = og.GeneratorParams(self.model)
        params.set_search_options(max_length=256, do_sample=False)
        generator = og.Generator(self.model, params)
        generator.append_tokens(tokens)
        stream, text = tokenizer.create_stream(), ""
        while not text and not generator.is_done():
            generator.generate_next_token()
            text = stream.decode(generator.get_next_tokens()[0])
        return {"text": text}

    def _prompted(self, prompts: list[list[int]], length: int) -> Any:
        import numpy as np

        generator = self._generator(len(prompts), length)
        generator.append_tokens(np.array(prompts if len(prompts) > 1 else prompts[0], np.int32))
        generator.generate_next_token()
        return generator

    def decode(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        """Seconds of each decode step."""
        generator, times = self._prompted(prompts, len(prompts[0]) + steps + 1), []
        for _ in range(steps):
            start = time.perf_counter()
            generator.generate_next_token()
            times.append(time.perf_counter() - start)
        return {"steps": times}

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Seconds from a prompt to its first token."""
        start = time.perf_counter()
        self._prompted([prompt], len(prompt) + 2)
        return {"seconds": time.perf_counter() - start}

    def streams(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Seconds of all answers, and their tokens."""
        start = time.perf_counter()
        generator = self._prompted(prompts, len(prompts[0]) + tokens)
        count = 1
        while count < tokens and not generator.is_done():
            generator.generate_next_token()
            count += 1
        return {"seconds": time.perf_counter() - start, "tokens": count * len(prompts)}

    def logits(self, texts: list[list[int]], file: str) -> dict[str, Any]:
        """Logits after every token of every text, one after the other; float32 into a .npy file."""
        import numpy as np

        rows = []
        for text in texts:
            generator = self._generator(1, len(text) + 2)
            for token in text:
                generator.append_tokens(np.array([token], np.int32))
                rows.append(np.asarray(generator.get_output("logits"))[0, -1].copy())
        np.save(file, np.array(rows, np.float32))
        return {}
