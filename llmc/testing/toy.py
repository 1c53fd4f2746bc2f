"""A toy model on disk and plans for it: runs the whole pipeline in milliseconds, with numpy alone.

The model is the fake target's (compiler/targets/fake.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from llmc.buckets.bucket import Bucket
from llmc.buckets.coverage import prove
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan, Provenance

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
EOS = len(BYTES)
"""Id of "<|end|>"; lower ids are one byte each."""
VOCAB = EOS + 1
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"

PROMPT = [(1, 4, 0), (1, 16, 0), (4, 4, 0), (4, 8, 0), (1, 8, 24), (2, 8, 8)]
DECODE = [(1, 8), (1, 32), (2, 16), (4, 16), (4, 32)]


@cache
def tokenizer_json() -> str:
    """A tokenizer in which every byte is a token, so that any text can be encoded."""
    backend = Tokenizer(BPE({name: index for index, name in enumerate(BYTES)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return str(backend.to_str())


def write_toy(
    folder: Path, *, hidden: int = 8, vocab: int = VOCAB, positions: int = 64, seed: int = 0, tokenizer: bool = True,
    **config: object,
) -> Path:  # fmt: skip
    """Write a toy checkpoint to `folder`. Weights depend on `seed`; `config` overrides config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    save_file(
        {name: random.normal(0, 0.6, (vocab, hidden)).astype(np.float32) for name in names},
        folder / "model.safetensors",
    )
    written = {
        "model_type": "toy", "vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": 1,
        "num_attention_heads": 1, "max_position_embeddings": positions, **config,
    }  # fmt: skip
    if tokenizer:
        written = {"eos_token_id": EOS, **written}
        (folder / "tokenizer.json").write_text(tokenizer_json())
        special = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(special))
    (folder / "config.json").write_text(json.dumps(written))
    return folder


def write_toy_encoder(folder: Path, task: str = "embed", *, hidden: int = 8, **config: object) -> Path:
    """Write a toy to `folder` that embeds (mean pooling, length 1) or scores (one label), for device fake.

    Its configuration is called BERT's (compiler/targets/fake_encoder.py).
    """
    kind = {"embed": "BertModel", "score": "BertForSequenceClassification"}[task]
    said = {"model_type": "bert", "architectures": [kind], "num_labels": 1, **config}
    write_toy(folder, hidden=hidden, **said)  # type: ignore[arg-type] # members of config.json
    if task == "embed":
        parts = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
        listed = [
            {"idx": at, "name": str(at), "path": location, "type": f"sentence_transformers.models.{part}"}
            for at, (location, part) in enumerate(parts.items())
        ]
        (folder / "modules.json").write_text(json.dumps(listed))
        (folder / "1_Pooling").mkdir(exist_ok=True)
        pooling = {"word_embedding_dimension": hidden, "pooling_mode_mean_tokens": True}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def toy_plan(
    prompt: Iterable[tuple[int, int, int]] = PROMPT, decode: Iterable[tuple[int, int]] = DECODE,
    limits: Limits | None = None,
) -> Plan:  # fmt: skip
    """A plan with exactly these buckets; by default for up to 4 sequences of 32 tokens, prompts in chunks."""
    buckets = [Bucket("prompt", *sizes) for sizes in prompt]
    buckets += [Bucket("decode", batch, 1, context) for batch, context in decode]
    plan = Plan(limits or Limits(32, 4, 64, 8), tuple(buckets), Provenance("test"))
    assert not prove(plan.limits, plan.buckets), prove(plan.limits, plan.buckets)
    return plan
