"""The reference: the transformers model itself, float32, unpadded, batch 1, with its own cache and attention."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmc.compiler.checkpoint.base import Checkpoint
from llmc.compiler.frontend.real_model import load_real_model
from llmc.compiler.verification.probes import LogitReference, T
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.compiler.frontend.real_model import StreamedWeights


class TransformersReference(LogitReference):
    """The checkpoint's model as transformers runs it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        if torch.get_num_threads() > (threads := Settings.from_environment().threads):
            torch.set_num_threads(threads)  # torch does not know about CPU quotas
        self._model = load_real_model(checkpoint)
        self._streamed: StreamedWeights | None = getattr(self._model, "streamed", None)
        self._keeps_states = bool(getattr(self._model, "_is_stateful", False))

    def together(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Run the calls; interleaved where weights are read as the model runs."""
        if self._streamed is None:
            return super().together(calls)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self._streamed.side_by_side(calls)

    def logits(self, tokens: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
        """Run one forward over the whole sequence; lm_head runs only at `positions`."""
        with torch.inference_mode(), _no_warnings():
            keep = torch.tensor(list(positions), dtype=torch.long)
            out = self._model(torch.tensor([list(tokens)]), logits_to_keep=keep, use_cache=False)
        rows: NDArray[np.float32] = out.logits[0].float().numpy()
        return rows

    def continued(self, prompt: Sequence[int], count: int) -> tuple[list[int], NDArray[np.float32]]:
        """Decode token by token, over transformers' own cache where it is one of keys and values.

        Recurrent state is recomputed with each token: transformers' single steps ignore a bound on whole sequences
        (Mamba-2's time_step_limit; transformers 5.23, modeling_mamba2.py, `mamba2_selective_state_update`).
        """
        if self._keeps_states:
            return self._built_anew(prompt, count)
        built: list[int] = []
        rows = np.empty((count, int(self._model.config.vocab_size)), np.float32)
        step, past = torch.tensor([list(prompt)]), None
        with torch.inference_mode(), _no_warnings():
            while len(built) < count:
                out: Any = self._model(step, use_cache=True, logits_to_keep=1, past_key_values=past)
                past = out.past_key_values
                rows[len(built)] = out.logits[0, -1].float().numpy()
                built.append(int(rows[len(built)].argmax()))
                step = torch.tensor([[built[-1]]])
        return built, rows

    def _built_anew(self, prompt: Sequence[int], count: int) -> tuple[list[int], NDArray[np.float32]]:
        tokens, rows = list(prompt), np.empty((count, int(self._model.config.vocab_size)), np.float32)
        for at in range(count):
            rows[at] = self.logits(tokens, [len(tokens) - 1])[0]
            tokens.append(int(rows[at].argmax()))
        return tokens[len(prompt) :], rows


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Suppress transformers' warnings; filters are the process's, and threads leave them alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
