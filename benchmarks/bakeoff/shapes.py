"""Shapes of models with random weights, and what a step has to read of them: the arithmetic of the roofline.

Sizes: config.json of meta-llama/Llama-3.2-1B and meta-llama/Llama-3.1-8B on the Hugging Face hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.buckets.bucket import Bucket
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan, Provenance

BYTES = 2
"""Of a number in bfloat16, weights and cache."""


@dataclass(frozen=True)
class Shape:
    """`config`: members of LlamaConfig."""

    name: str
    config: Mapping[str, Any]

    @property
    def head_dim(self) -> int:
        """Of queries, keys and values."""
        return int(self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"])

    @property
    def matrix_weights(self) -> int:
        """Values that a decode step multiplies with: all matrices, the head too; an embedding is only looked up."""
        c = self.config
        hidden, inner, kv = c["hidden_size"], c["intermediate_size"], c["num_key_value_heads"] * self.head_dim
        queries = c["num_attention_heads"] * self.head_dim
        layer = 2 * hidden * queries + 2 * hidden * kv + 3 * hidden * inner
        return int(c["num_hidden_layers"] * layer + c["vocab_size"] * hidden)

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one token, in bytes."""
        c = self.config
        return int(2 * c["num_hidden_layers"] * c["num_key_value_heads"] * self.head_dim * BYTES)

    def step_bytes(self, batch: int, tokens: int) -> int:
        """What a decode step of `batch` sequences of `tokens` cached tokens reads at least."""
        return self.matrix_weights * BYTES + batch * tokens * self.kv_bytes

    def write(self, folder: Path, device: str) -> Path:
        """The model with random weights as a Hugging Face folder, drawn on `device`; nothing where it is there."""
        if (folder / "config.json").exists():
            return folder
        import torch
        from transformers import AutoModelForCausalLM, LlamaConfig

        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(LlamaConfig(**self.config), dtype=torch.bfloat16)
        part = folder.with_name(f"{folder.name}.part")
        model.save_pretrained(part)
        (part / "generation_config.json").unlink(missing_ok=True)
        part.rename(folder)
        return folder


def _llama(factor: float, **sizes: Any) -> dict[str, Any]:
    rope = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
    }  # fmt: skip
    common = {"vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8, "rope_parameters": rope}
    return {**common, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, **sizes}


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama-1b", _llama(
            32.0, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, head_dim=64, tie_word_embeddings=True
        )),
        Shape("llama-8b", _llama(
            8.0, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, head_dim=128,
            tie_word_embeddings=False,
        )),
        Shape("tiny", {
            "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        }),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Points:
    """What is measured: decode steps of each of `batches` after prompts of `context` tokens, over `steps` steps, and
    prompts of each of `prompts` tokens."""

    batches: tuple[int, ...] = (1, 8, 64)
    context: int = 64
    steps: int = 32
    prompts: tuple[int, ...] = (512, 2048)
    graphs: int = 48

    def decode_plan(self) -> Plan:
        """`graphs` decode graphs, those of `batches` among them; contexts to where the measured steps end."""
        longest = _blocks(self.context + self.steps + 1)
        most = max(self.batches)
        contexts = sorted({_blocks(longest * part / 3) for part in (1, 2, 3)})
        every = spread(self.batches, max(len(self.batches), self.graphs // len(contexts)))
        buckets = [Bucket("decode", batch, 1, context) for batch in every for context in contexts]
        prompts = [Bucket("prompt", 1, _blocks(self.context), 0), Bucket("prompt", 1, longest, 0)]
        return _plan(longest, most, [*dict.fromkeys(prompts), *buckets])

    def prefill_plan(self) -> Plan:
        """A prompt bucket a length, and the decode bucket that an engine needs to go on."""
        longest = _blocks(max(self.prompts) + 1)
        buckets = [Bucket("prompt", 1, length, 0) for length in (*sorted(self.prompts), longest)]
        return _plan(longest, 1, [*dict.fromkeys(buckets), Bucket("decode", 1, 1, longest)])


def spread(batches: tuple[int, ...], count: int) -> list[int]:
    """`count` batch sizes up to the largest of `batches`, those among them; fewer where there are not so many."""
    most = max(batches)
    found = set(batches)
    others = [n for step in (8, 4, 2, 1) for n in range(step, most + 1, step)]
    for other in others:
        if len(found) >= count:
            break
        found.add(other)
    return sorted(found)


def _blocks(tokens: float, block: int = 16) -> int:
    """Tokens, up to whole blocks of the KV cache."""
    return max(1, -(-int(tokens) // block)) * block


def _plan(longest: int, sequences: int, buckets: list[Bucket]) -> Plan:
    return Plan(Limits(longest, sequences, longest, 16), tuple(buckets), Provenance("bake-off"))
