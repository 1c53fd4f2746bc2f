"""llama.cpp as an engine, by llama-cpp-python's bindings: a GGUF file, several sequences decoded in one batch."""

from __future__ import annotations

import ctypes
import time
from importlib import import_module
from typing import Any

lc: Any = import_module("llama_cpp")

BATCH, MICRO_BATCH = 2048, 512
"""Tokens that one call takes, and that one pass over the weights computes: llama.cpp's defaults."""


class Engine:
    """Answers for one file, with `sequences` of up to `length` tokens; see __init__.py.

    `micro_batch`: tokens of one pass over the weights.
    """

    def __init__(
        self, model: str, threads: int, sequences: int = 1, length: int = 512, micro_batch: int = MICRO_BATCH
    ) -> None:
        lc.llama_backend_init()
        self._quiet = lc.llama_log_callback(lambda *_: None)
        lc.llama_log_set(self._quiet, ctypes.c_void_p(0))
        self.model = lc.llama_model_load_from_file(model.encode(), lc.llama_model_default_params())
        if not self.model:
            raise OSError(f"{model}: llama.cpp does not read it")
        params = lc.llama_context_default_params()
        params.n_ctx, params.n_seq_max = sequences * length, sequences
        params.n_batch, params.n_ubatch = BATCH, micro_batch
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = False
        self.context = lc.llama_init_from_model(self.model, params)
        self.vocabulary = lc.llama_model_get_vocab(self.model)
        self.batch = lc.llama_batch_init(BATCH, 0, 1)
        self.sequences = sequences

    def about(self) -> dict[str, Any]:
        """Its version."""
        return {"versions": {"llama-cpp-python": lc.__version__}}

    def warm(self) -> dict[str, Any]:
        """Nothing to do."""
        return {}

    def _clear(self) -> None:
        lc.llama_memory_clear(lc.llama_get_memory(self.context), True)

    def _run(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Run (token, position, sequence, wants logits) rows."""
        for i, (token, position, sequence, wants) in enumerate(rows):
            self.batch.token[i], self.batch.pos[i], self.batch.logits[i] = token, position, wants
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = sequence
        self.batch.n_tokens = len(rows)
        if lc.llama_decode(self.context, self.batch) != 0:
            raise RuntimeError("llama_decode failed")

    def _logits(self, index: int) -> Any:
        import numpy as np

        size = lc.llama_vocab_n_tokens(self.vocabulary)
        return np.ctypeslib.as_array(lc.llama_get_logits_ith(self.context, index), (size,))

    def _best(self, index: int) -> int:
        return int(self._logits(index).argmax())

    def _prompted(self, prompts: list[list[int]]) -> list[int]:
        """The first token of each answer."""
        self._clear()
        rows = [(t, i, s, i == len(p) - 1) for s, p in enumerate(prompts) for i, t in enumerate(p)]
        last = [0] * len(prompts)
        for at in range(0, len(rows), BATCH):
            part = rows[at : at + BATCH]
            self._run(part)
            for index, (_, _, sequence, wants) in enumerate(part):
                if wants:
                    last[sequence] = self._best(index)
        return last

    def _step(self, last: list[int], position: int) -> list[int]:
        self._run([(token, position, sequence, True) for sequence, token in enumerate(last)])
        return [self._best(index) for index in range(len(last))]

    def first_token(self, question: str) -> dict[str, Any]:
        """The first text of the answer to a question, in the model's chat form."""
        tokens, pieces = self._tokens(self._chat(question)), b""
        last, text = self._prompted([tokens]), ""
        for position in range(len(tokens), len(tokens) + 16):
            buffer = ctypes.create_string_buffer(128)
            size = lc.llama_token_to_piece(self.vocabulary, last[0], buffer, len(buffer), 0, False)
            pieces += buffer.raw[:size]
            text = pieces.decode(errors="ignore")
            if text:
                break
            last = self._step(last, position)
        return {"text": text}

    def _chat(self, question: str) -> bytes:
        message = lc.llama_chat_message(role=b"user", content=question.encode())
        template = lc.llama_model_chat_template(self.model, None)
        buffer = ctypes.create_string_buffer(len(question.encode()) + 4096)
        size = lc.llama_chat_apply_template(
            template, (lc.llama_chat_message * 1)(message), 1, True, buffer, len(buffer)
        )
        if size < 0:
            raise ValueError("llama.cpp does not know the model's chat template")
        return buffer.raw[:size]

    def _tokens(self, text: bytes) -> list[int]:
        found = (lc.llama_token * (len(text) + 8))()
        count = lc.llama_tokenize(self.vocabulary, text, len(text), found, len(found), True, True)
        return list(found[:count])

    def decode(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        """Seconds of each decode step."""
        last, times = self._prompted(prompts), []
        for step in range(steps):
            start = time.perf_counter()
            last = self._step(last, len(prompts[0]) + step)
            times.append(time.perf_counter() - start)
        return {"steps": times}

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Seconds from a prompt to its first token."""
        start = time.perf_counter()
        self._prompted([prompt])
        return {"seconds": time.perf_counter() - start}

    def streams(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Seconds of all answers, and their tokens."""
        start = time.perf_counter()
        last = self._prompted(prompts)
        for step in range(tokens - 1):
            last = self._step(last, len(prompts[0]) + step)
        return {"seconds": time.perf_counter() - start, "tokens": tokens * len(prompts)}

    def logits(self, texts: list[list[int]], file: str) -> dict[str, Any]:
        """Logits after every token of every text, one after the other; float32 into a .npy file."""
        import numpy as np

        rows = []
        for text in texts:
            self._clear()
            for at in range(0, len(text), BATCH):
                part = text[at : at + BATCH]
                self._run([(token, at + index, 0, True) for index, token in enumerate(part)])
                rows += [self._logits(index).copy() for index in range(len(part))]
        np.save(file, np.array(rows, np.float32))
        return {}
