"""GGUF files: those of llama.cpp's own converters, and the tokenizers of its vocabulary files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from llmc.compiler.architectures.shared.architectures import by_gguf_architecture
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.checkpoint.gguf_config import Metadata
from llmc.compiler.checkpoint.gguf_file import StringArray, read_header
from llmc.compiler.checkpoint.gguf_tokenizer import build_tokenizer_json
from tests.compiler import tiny
from tests.compiler.checkpoint.test_gguf_architectures import CONVERTED, RECORDED, meaning
from tests.oracles.conftest import releases

pytestmark = pytest.mark.oracle

AS_CONVERTED: dict[str, dict[str, Any]] = {
    "cohere2": {
        "num_hidden_layers": 4, "layer_types": [*["sliding_attention"] * 3, "full_attention"],
    },
    "falcon": {"ffn_hidden_size": 256, "multi_query": False},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {
        "num_hidden_layers": 6, "layer_types": [*["sliding_attention"] * 5, "full_attention"],
        "query_pre_attn_scalar": 16,
    },
    "gpt_oss": {"swiglu_limit": 7.0},
    "gpt_bigcode": {"n_inner": 256, "intermediate_size": 256},
    "granitemoehybrid": {"position_embedding_type": "nope"},
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "mamba2": {"time_step_limit": None},
    "ministral3": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "phi": {"intermediate_size": 256, "num_key_value_heads": 4},
    "qwen2_moe": {"mlp_only_layers": []},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    "starcoder2": {"sliding_window": None},
}  # fmt: skip
"""Members of tiny configurations that files cannot say, because llama.cpp has them built in."""
NAMES = sorted(name for names in by_gguf_architecture().values() for name in names)
_TOLERANCE = 3e-7
"""Norms lose this when 1 is added to them and subtracted."""


def llama_cpp() -> Path:
    found = releases("llama-cpp-python")
    if not found:
        pytest.fail("no llama-cpp-python in .oracles: run make oracles")
    return found[-1] / "vendor/llama.cpp"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with NAME, a Hugging Face folder, and NAME.gguf for each architecture."""
    root = tmp_path_factory.mktemp("converted")
    for name in NAMES:
        config = {key: v for key, v in {**tiny.config(name), **AS_CONVERTED.get(name, {})}.items() if v is not None}
        tiny.OTHERS[f"{name}-as-converted"] = config
        tiny.write_model(root / name, f"{name}-as-converted")
        written = json.loads((root / name / "config.json").read_text())
        if name == "granitemoehybrid":  # the converter does not know the names of transformers 5
            written["layer_types"] = ["mamba", "attention"]
        if name == "cohere2":
            written["rotary_pct"] = 1.0
        (root / name / "config.json").write_text(json.dumps(written))
    script = Path(__file__).with_name("convert_gguf.py")
    command = [sys.executable, str(script), str(llama_cpp()), *(str(root / name) for name in NAMES)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": ""})
    if "COMPARED" in os.environ:
        _record(root)
    return root


def _record(root: Path) -> None:
    found = {}
    for name in NAMES:
        header = read_header(root / f"{name}.gguf")
        metadata = {
            key: value.tolist() if isinstance(value, np.ndarray) else value
            for key, value in header.metadata.items()
            if not isinstance(value, StringArray) and not key.startswith(("general.", "tokenizer."))
        }
        found[name] = {
            "architecture": header.metadata["general.architecture"],
            "config": json.loads((root / name / "config.json").read_text()),
            "metadata": metadata,
            "tensors": {tensor: list(info.shape) for tensor, info in sorted(header.tensors.items())},
        }
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(record)}" for name, record in found.items())
    RECORDED.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_a_converted_checkpoint_is_read_as_the_original(name: str, converted: Path) -> None:
    original, found = open_checkpoint(converted / name), open_checkpoint(converted / f"{name}.gguf")
    assert meaning(found.config) == meaning(original.config)
    assert {*found.tensor_names()} | {"lm_head.weight"} == {*original.tensor_names()} | {"lm_head.weight"}
    for tensor in found.tensor_names():
        assert found.shape(tensor) == original.shape(tensor)
        np.testing.assert_allclose(found.tensor(tensor), original.tensor(tensor), rtol=0, atol=_TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_recorded_of_it_is_what_the_converter_writes(name: str, converted: Path) -> None:
    header, record = read_header(converted / f"{name}.gguf"), CONVERTED[name]
    assert record["tensors"] == {tensor: list(info.shape) for tensor, info in sorted(header.tensors.items())}
    for key, value in record["metadata"].items():
        np.testing.assert_array_equal(np.asarray(header.metadata[key]), np.asarray(value), err_msg=key)


def _vocabularies() -> list[str]:
    found = releases("llama-cpp-python")[-1:]
    files = [path for root in found for path in sorted((root / "vendor/llama.cpp/models").glob("*.gguf.inp"))]
    return [path.name.removesuffix(".gguf.inp") for path in files]


@pytest.mark.parametrize("name", [name for name in _vocabularies() if "bert" not in name])
def test_token_ids_are_those_that_llama_cpp_expects(name: str) -> None:
    file = llama_cpp() / f"models/{name}.gguf"
    tokenizer = Tokenizer.from_str(build_tokenizer_json(Metadata(read_header(file))).decode())
    texts = file.with_name(f"{name}.gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    expected = file.with_name(f"{name}.gguf.out").read_text().splitlines()
    assert len(texts) >= 45
    for text, ids in zip(texts, expected, strict=False):
        assert tokenizer.encode(text, add_special_tokens=False).ids == [int(i) for i in ids.split()], text
