"""The reference's own greedy texts: their logits are those of whole sequences, whatever transformers' cache gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.verification.transformers_reference import TransformersReference
from tests.compiler import tiny
from tests.models.texts import NEW, PROMPTS


def test_logits_of_greedy_texts_are_those_of_whole_sequences(mechanism: str, tmp_path: Path) -> None:
    reference = TransformersReference(open_checkpoint(str(tiny.write_model(tmp_path / "model", mechanism))))
    prompt = list(PROMPTS[0])
    built, logits = reference.continued(prompt, NEW)
    whole = reference.logits([*prompt, *built], range(len(prompt) - 1, len(prompt) + NEW - 1))
    assert built == logits.argmax(-1).tolist()
    assert logits == pytest.approx(whole, abs=1e-4)
    assert np.isfinite(logits).all()
