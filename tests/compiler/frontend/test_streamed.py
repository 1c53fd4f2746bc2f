"""A model whose weights are read layer by layer gives what it gives with all of them held."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.checkpoint.base import Checkpoint
from llmc.compiler.checkpoint.huggingface import HuggingFaceCheckpoint
from llmc.compiler.frontend import real_model
from llmc.compiler.frontend.real_model import StreamedWeights
from llmc.compiler.verification.transformers_reference import TransformersReference
from llmc.errors import CheckpointError
from tests.compiler import tiny
from tests.tiers import default_cases

PROMPTS = [[5, 9, 2, 7], [3, 1], [8, 8, 4, 100, 6, 2, 9]]
COUNTS = [4, 2, 5]
ARCHITECTURES = ["llama", "gemma3_text", "gpt2", "qwen3_moe", "gpt_oss", "qwen3_next", "deepseek_v3", "mamba", "falcon"]
"""Tied and scaled embeddings, learned positions, experts, sinks, states, latent attention, and what is traced whole."""


@pytest.fixture
def streaming(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a large model."""
    monkeypatch.setattr(real_model, "STREAMED", 0)
    monkeypatch.setattr(real_model, "LARGE", 1)


def predicted(reference: TransformersReference) -> tuple[list[list[int]], list[np.ndarray]]:
    built = reference.together(
        [partial(reference.greedy, prompt, n) for prompt, n in zip(PROMPTS, COUNTS, strict=True)]
    )
    return built, reference.together([partial(reference.logits, p, range(len(p))) for p in PROMPTS])


@default_cases(4)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_predictions_are_those_of_the_whole_model(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    checkpoint = open_checkpoint(tiny.write_model(tmp_path / "model", architecture))
    whole = predicted(TransformersReference(checkpoint))
    request.getfixturevalue("streaming")
    reference = TransformersReference(checkpoint)
    assert any(p.is_meta for p in reference._model.parameters())
    found = predicted(reference)
    assert found[0] == whole[0]
    for one, other in zip(found[1], whole[1], strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(reference.logits(PROMPTS[0], [3]), whole[1][0][3:], atol=1e-5)  # one call, by itself
    tokens, logits = reference.continued(PROMPTS[0], 3)
    forward = reference.logits([*PROMPTS[0], *tokens], [3, 4, 5])
    np.testing.assert_allclose(logits, forward, atol=1e-5, err_msg="over a cache as without one")


@pytest.mark.usefixtures("streaming")
def test_calls_side_by_side_read_each_layer_once_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(tiny.write_model(tmp_path / "model", "llama"))
    reference = TransformersReference(checkpoint)
    reads: Counter[str] = Counter()
    fill = HuggingFaceCheckpoint.fill

    def counted(self: Checkpoint, name: str, out: np.ndarray) -> None:
        reads[name] += 1
        fill(self, name, out)

    reference.together([partial(reference.greedy, prompt, 1) for prompt in PROMPTS])
    monkeypatch.setattr(HuggingFaceCheckpoint, "fill", counted)
    reference.together([partial(reference.greedy, prompt, 3) for prompt in PROMPTS])
    layers = {name: n for name, n in reads.items() if ".layers." in name}
    assert len(layers) > 10
    assert set(layers.values()) == {3}


@pytest.mark.usefixtures("streaming")
def test_a_call_that_fails_is_raised_and_the_others_end(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny.write_model(tmp_path / "model", "llama"))
    reference = TransformersReference(checkpoint)
    ended: list[int] = []

    def call(index: int) -> None:
        reference.greedy(PROMPTS[index], 2)
        ended.append(index)

    def failing() -> None:
        reference.logits([10**6], [0])  # no token

    with pytest.raises(IndexError):
        reference.together([partial(call, 0), failing, partial(call, 1)])
    assert sorted(ended) == [0, 1]
    assert reference.together([partial(reference.greedy, PROMPTS[1], 2)])[0] == reference.greedy(PROMPTS[1], 2)


def test_an_interrupt_ends_the_calls_before_it_is_raised() -> None:
    layers = nn.ModuleList([nn.Linear(4, 4, device="meta") for _ in range(2)])
    weights = StreamedWeights(layers, list(layers), lambda _, tensor: tensor.zero_(), lambda: None)
    x, running = torch.zeros(1, 4), [True, True]

    def call(number: int) -> None:
        if number == 1:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        try:
            while True:
                for layer in layers:
                    layer(x)
        finally:
            running[number] = False

    with pytest.raises(KeyboardInterrupt):
        weights.side_by_side([partial(call, 0), partial(call, 1)])
    assert running == [False, False]


@pytest.mark.usefixtures("streaming")
def test_a_value_that_is_no_number_is_refused_as_the_layer_is_read(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "model", "llama")
    name = "model.layers.1.mlp.down_proj.weight"
    checkpoint = open_checkpoint(folder)
    stored = checkpoint._where(name)  # type: ignore[attr-defined] # of a folder
    file = checkpoint._owner[stored]  # type: ignore[attr-defined]
    data = bytearray((folder / "model.safetensors").read_bytes())
    begin = file.tensors[stored].begin
    data[begin : begin + 4] = np.float32("nan").tobytes()
    (folder / "model.safetensors").write_bytes(data)
    reference = TransformersReference(open_checkpoint(folder))
    with pytest.raises(CheckpointError, match=rf"tensor {name} holds a non-finite value"):
        reference.logits(PROMPTS[0], [0])


def test_no_more_than_a_unit_is_held_at_a_time() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(5))
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x) * self.scale
                held.append(sum(not p.is_meta for p in self.parameters()))
            return x

    held: list[int] = []
    with torch.device("meta"):
        model = Model()
    filled: list[str] = []
    offsets: set[int] = set()

    def fill(name: str, tensor: Tensor) -> None:
        filled.append(name)
        offsets.add(tensor.data_ptr())
        tensor.fill_(1)

    StreamedWeights(model, list(model.layers), fill, lambda: None)
    assert filled == ["scale"]
    model(torch.ones(1, 8))
    assert held == [2] * 5
    assert filled[1:] == [f"layers.{i}.weight" for i in range(5)]
    assert len(offsets) == 2, "one layer's memory is the next one's"


def test_stored_types_fill_as_they_are_read(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from llmc.compiler.checkpoint.safetensors_file import SafetensorsFile

    built = torch.randn(3, 5)
    types: Sequence[torch.dtype] = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    save_file({str(t): built.to(t) for t in types}, tmp_path / "a.safetensors")
    file = SafetensorsFile(tmp_path / "a.safetensors")
    for t in types:
        out = np.full((3, 5), np.nan, np.float32)
        file.fill(str(t), out)
        np.testing.assert_array_equal(out, built.to(t).float().numpy())
        np.testing.assert_array_equal(out, file.tensor(str(t)))
    file.forget()
    np.testing.assert_array_equal(file.tensor(str(torch.bfloat16)), built.to(torch.bfloat16).float().numpy())
