"""llama.cpp decoding several sequences in one batch, as a worker of serving.py; runs in the peers' environment.

llama-cpp-python's own server answers one request at a time; this is what its library can do beneath.
"""

from __future__ import annotations

import ctypes
import sys
import time

import llama_cpp as lc
import numpy as np
from worker import serve

SEQUENCES, CONTEXT, BATCH = 8, 512, 512


class LlamaCpp:
    def __init__(self, gguf: str, threads: str) -> None:
        lc.llama_backend_init()
        self._quiet = lc.llama_log_callback(lambda *_: None)
        lc.llama_log_set(self._quiet, ctypes.c_void_p(0))
        self.model = lc.llama_model_load_from_file(gguf.encode(), lc.llama_model_default_params())
        params = lc.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch, params.n_ubatch = SEQUENCES * CONTEXT, SEQUENCES, BATCH, BATCH
        params.n_threads = params.n_threads_batch = int(threads)
        params.kv_unified = False
        self.context = lc.llama_init_from_model(self.model, params)
        self.vocabulary = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(self.model))
        self.batch = lc.llama_batch_init(BATCH, 0, 1)

    def warm(self) -> dict:
        return {}

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Run (token, position, sequence, wants logits) rows."""
        for i, (token, position, sequence, wants) in enumerate(rows):
            self.batch.token[i], self.batch.pos[i], self.batch.logits[i] = token, position, wants
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = sequence
        self.batch.n_tokens = len(rows)
        if lc.llama_decode(self.context, self.batch) != 0:
            raise SystemExit("llama_decode failed")

    def _best(self, place: int) -> int:
        logits = lc.llama_get_logits_ith(self.context, place)
        return int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())

    def generate(self, prompts: list[list[int]], tokens: int) -> dict:
        start = time.perf_counter()
        lc.llama_memory_clear(lc.llama_get_memory(self.context), True)
        rows = [(t, i, s, i == len(p) - 1) for s, p in enumerate(prompts) for i, t in enumerate(p)]
        last = [0] * len(prompts)
        for at in range(0, len(rows), BATCH):
            part = rows[at : at + BATCH]
            self._decode(part)
            for place, (_, _, sequence, wants) in enumerate(part):
                if wants:
                    last[sequence] = self._best(place)
        for step in range(tokens - 1):
            self._decode([(last[s], len(p) + step, s, True) for s, p in enumerate(prompts)])
            last = [self._best(s) for s in range(len(prompts))]
        return {"seconds": time.perf_counter() - start, "tokens": tokens * len(prompts)}


if __name__ == "__main__":
    serve(LlamaCpp(*sys.argv[1:]))
