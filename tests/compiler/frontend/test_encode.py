"""Models that embed, before they are traced: positions as transformers counts them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.frontend.encode import Encode
from llmc.errors import CheckpointError
from tests.compiler.checkpoint.quantised import packers
from tests.compiler.encoders_tiny import write_encoder


@pytest.mark.parametrize("encoder", ["roberta", "mpnet"])
def test_a_token_that_is_the_paddings_has_its_position_inside_a_text(encoder: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "model", encoder)
    padding = 1
    ids = torch.tensor([[5, padding, 7, padding, 9, 11, padding, 6]])
    with torch.no_grad():
        found = Encode(open_checkpoint(folder), "embed")(ids, torch.tensor([5]))[0, :5]
        reference = AutoModel.from_pretrained(folder).eval()
        wanted = reference(ids[:, :5]).last_hidden_state[0]
        counted = torch.arange(5)[None] + padding + 1
        assert torch.allclose(found, wanted, atol=1e-5)
        assert not torch.allclose(found, reference(ids[:, :5], position_ids=counted).last_hidden_state[0], atol=1e-3)


def test_weights_in_quantized_weights_are_refused(tmp_path: Path) -> None:
    """transformers alone would read them, in ways that nothing here checks."""
    packers.write(tmp_path, *packers.CASES["int-quantized by channel"], case="qwen3")
    with pytest.raises(
        CheckpointError, match=r"weights are quantized, .*--task embed needs unquantized ones: take the"
    ):
        Encode(open_checkpoint(tmp_path), "embed")
