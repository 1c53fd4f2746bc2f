"""Tiny random-weight models of the supported architectures: configurations, models, and checkpoints on disk."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Mapping
from functools import cache, wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from llmc.buckets.bucket import Bucket, Phase
from llmc.buckets.coverage import prove
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan, Provenance
from llmc.compiler.architectures import supported
from llmc.compiler.architectures.shared.architectures import architecture
from llmc.compiler.frontend import trace as tracing
from llmc.compiler.frontend.attention import attention_name
from llmc.compiler.frontend.skeleton import model_config
from llmc.compiler.frontend.traceable import build_traceable
from llmc.testing.toy import EOS, TEMPLATE, VOCAB, tokenizer_json

# pytest captures what loggers that do not propagate say, and torch traces in full for whoever listens: half the time
_TRACE_LOG = logging.getLogger("torch.__trace")
_TRACE_LOG.handlers.clear()
_TRACE_LOG.propagate = True


def remembered(traced: Callable[..., Any]) -> Callable[..., Any]:
    """`traced`, which makes the same program of the same configuration and arguments, called once for each."""
    built: dict[str, Any] = {}

    @wraps(traced)
    def look_up(config: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        key = json.dumps([config, args, sorted(kwargs.items())], sort_keys=True, default=str)
        if key not in built:
            built[key] = traced(config, *args, **kwargs)
        return built[key]

    return look_up


# a third of what compiles of tiny models take is tracing the same few configurations: each is traced once a process
for _name in ("trace", "trace_weightless"):
    setattr(tracing, _name, remembered(getattr(tracing, _name)))

# tiny operators gain nothing from threads, and lose much when other processes want the processors
torch.set_num_threads(1)

_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


def of_architecture(name: str) -> dict[str, Any]:
    """The tiny configuration that a family's file has."""
    own = architecture({"model_type": name})
    return own.in_common_terms({"model_type": name, "vocab_size": VOCAB, **own.tiny})


ARCHITECTURES: dict[str, dict[str, Any]] = {name: of_architecture(name) for name in supported()}
"""Of each family that there is."""
FORMS: dict[str, dict[str, Any]] = {
    "falcon-alibi": {
        **ARCHITECTURES["falcon"], "alibi": True, "new_decoder_architecture": False, "multi_query": False,
        "parallel_attn": False, "bias": True, "num_attention_heads": 16, "num_kv_heads": 16, "num_key_value_heads": 16,
    },
}  # fmt: skip
"""Further forms of families, which attend in another way than their tiny configurations."""
REPRESENTATIVES = ("llama", "mistral", "qwen2", "qwen3")
"""One family for each mechanism of the front end and of lowerings, for tests that take long; tests/models has all."""
VARIANTS: dict[str, dict[str, Any]] = {
    "llama-tied-biases-llama3-rope": {
        "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "rope_parameters": _LLAMA3,
    },
    "llama-one-kv-head-linear-rope": {
        "num_key_value_heads": 1, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    },
    "llama-wide-heads-without-groups": {"head_dim": 32, "num_key_value_heads": 4},
}  # fmt: skip
DEEP = {"llama-three-layers": {"num_hidden_layers": 3}}
"""For what needs layers to repeat; not among the variants that every lowering is held to."""

TIED = "llama-tied-biases-llama3-rope"
SIZES = "gemma4-of-two-layers"
WIDE = "llama-of-wide-matrices"
OTHERS = {
    WIDE: {
        **of_architecture("llama"), "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1,
        "head_dim": 32,
    },
    SIZES: {
        **of_architecture("gemma4_text"), "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "enable_moe_block": False,
    }
}  # fmt: skip
"""A layer with a window, and one without whose heads are of another number and width, traced in half of the time; and
matrices wide enough for a few groups of 32, 64 or 128 inputs."""


def config(name: str) -> dict[str, Any]:
    """The configuration of a case, in the terms of config.json."""
    if known := (ARCHITECTURES | OTHERS | FORMS).get(name):
        return dict(known)
    return {**ARCHITECTURES["llama"], "num_hidden_layers": 1, **(VARIANTS | DEEP)[name]}


@cache
def model(name: str) -> nn.Module:
    """The transformers model of a case; every tensor of its checkpoint is random, biases and norms too."""
    built: nn.Module = AutoModelForCausalLM.from_config(model_config(config(name)), dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        buffers = [
            (name, b) for name, b in built.named_buffers() if name in built.state_dict() and b.is_floating_point()
        ]
        for tensor_name, t in [*built.named_parameters(), *buffers]:
            t.normal_(0, 0.15, generator=generator)
            if "norm" in tensor_name or "scalar" in tensor_name:
                t.add_(1)
    return built.eval().requires_grad_(False)


@cache
def tensors(name: str) -> dict[str, torch.Tensor]:
    """What programs of a case take as weights: all that its model has, and tables that only what is traced has."""
    traced, built = build_traceable(config(name), attention_name("two_part")), model(name)
    return dict(traced.named_buffers()) | dict(built.named_parameters()) | dict(built.named_buffers())


@torch.no_grad()
def logits(name: str, tokens: list[int]) -> np.ndarray:
    """The model's logits after every token of one sequence, without padding or cache, [n, V]."""
    return model(name)(torch.tensor([tokens]), use_cache=False).logits[0].numpy()


def greedy(name: str, prompt: list[int], count: int) -> list[int]:
    """The model's greedy continuation, which no end token stops."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits(name, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def write_model(folder: Path, name: str) -> Path:
    """Write a case as a Hugging Face folder: safetensors, configuration, tokenizer, chat template."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(name).save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"eos_token_id": EOS}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))
    return folder


def tiny_plan() -> Plan:
    """At most 3 sequences of 48 tokens; prompts start in one of two buckets and go on in chunks of 16."""
    return _plan(
        ("prompt", 1, 16, 0), ("prompt", 3, 8, 0), ("prompt", 1, 16, 32), ("decode", 1, 1, 48), ("decode", 3, 1, 48)
    )


def kinds_plan() -> Plan:
    """The same sequences in one bucket of each kind, three rows in each: for devices that compile for long."""
    return _plan(("prompt", 3, 16, 0), ("prompt", 3, 16, 32), ("decode", 3, 1, 48))


def _plan(*sizes: tuple[Phase, int, int, int]) -> Plan:
    buckets = tuple(Bucket(*s) for s in sizes)
    plan = Plan(Limits(48, 3, 48, 8), buckets, Provenance("test"))
    assert not prove(plan.limits, plan.buckets), prove(plan.limits, plan.buckets)
    return plan
