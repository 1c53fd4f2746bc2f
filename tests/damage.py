"""A device on which one token does harm: what it computes there, and keeps of it, is NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmc.runtime.executors.fake.device import FakeProgram
from tests.devices import use


def spoil(monkeypatch: pytest.MonkeyPatch, token: int, times: float = float("inf")) -> None:
    """From now on the fake device makes NaN of `token`, in the cache and in each row that has it, in `times` steps."""
    left = [times]

    def spoiled(self: FakeProgram, token_ids: Any, past_lengths: Any, new_lengths: Any, past: Any) -> Any:
        logits, new = self.replay(token_ids, past_lengths, new_lengths, past)
        live = np.arange(token_ids.shape[1]) < new_lengths[:, None]
        bad = live & (token_ids == token)
        if bad.any() and left[0] > 0:
            left[0] -= 1
            new[bad] = np.nan
            logits[bad.any(1)] = np.nan
        return logits, new

    use(monkeypatch, replay=spoiled)
