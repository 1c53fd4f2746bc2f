"""A tensor or a key that nothing reads is refused by name, since the reference would not see it either."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llmc.compiler.architectures import supported
from llmc.compiler.architectures.shared.architectures import architecture
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.frontend.consumed import READ, ROPE, require_consumed, tensor_names
from llmc.compiler.frontend.skeleton import build_skeleton, model_config
from llmc.errors import CheckpointError
from tests.compiler import tiny
from tests.tiers import default_cases
from tests.toy import Toy

COMMON: dict[str, Any] = {
    "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 96,
    "max_position_embeddings": 2048, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.43.1",
    "use_cache": True, "vocab_size": 99, "bos_token_id": 1, "eos_token_id": [2, 3], "attention_dropout": 0.0,
}  # fmt: skip
GENUINE: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False,
        "pretraining_tp": 1, "rope_theta": 500000.0, "rope_scaling": {
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "llama-small": {
        "model_type": "llama", "is_llama_config": True, "rope_interleaved": False, "rope_scaling": None,
        "rope_theta": 100000, "pad_token_id": 2, "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    },
    "mistral": {"model_type": "mistral", "head_dim": None, "rope_theta": 1000000.0, "sliding_window": 4096},
    "qwen2": {
        "model_type": "qwen2", "max_window_layers": 21, "rope_theta": 1000000.0, "sliding_window": 32768,
        "use_mrope": False, "use_sliding_window": False,
    },
    "qwen3": {
        "model_type": "qwen3", "attention_bias": False, "head_dim": 16, "max_window_layers": 28, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": None, "use_sliding_window": False,
    },
    "qwen3-yarn": {
        "model_type": "qwen3", "rope_theta": 1000000,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    },
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.write_model(tmp_path / "model", "llama")


def change_config(folder: Path, **members: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | members))


def config_only(tmp_path: Path, config: dict[str, Any]) -> Any:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return open_checkpoint(path)


@pytest.mark.parametrize("name", GENUINE)
def test_configurations_as_they_are_published_are_read_in_full(name: str, tmp_path: Path) -> None:
    require_consumed(config_only(tmp_path, {**COMMON, **GENUINE[name]}))


def test_the_demo_model_is_read_in_full() -> None:
    require_consumed(open_checkpoint("smollm2-demo"))


@default_cases(16)
@pytest.mark.parametrize("name", [*tiny.ARCHITECTURES, *tiny.VARIANTS])
def test_the_names_of_tensors_are_those_of_the_model(name: str) -> None:
    config = tiny.config(name)
    assert tensor_names(config) == set(build_skeleton(config).state_dict())


@pytest.mark.parametrize(
    ("left", "members"),
    [
        ("attn_logit_softcapping: 30.0", {"attn_logit_softcapping": 30.0}),
        ("sliding_window: 4096", {"sliding_window": 4096}),
        ("pretraining_tp: 2", {"pretraining_tp": 2}),
        ("partial_rotary_factor: 0.5", {"partial_rotary_factor": 0.5}),
        ("residual_multiplier: 0.22, logits_scaling: 8.0", {"residual_multiplier": 0.22, "logits_scaling": 8.0}),
        ("rope_scaling: {'factor': 2.0}", {"rope_scaling": {"factor": 2.0}}),
        (
            "rope_parameters.mscale: 0.7",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "mscale": 0.7}},
        ),
        ("rope_parameters.rope_type: 'ntk'", {"rope_parameters": {"rope_type": "ntk", "rope_theta": 1e4}}),
        ("rope_parameters.factor: 4.0", {"rope_parameters": {"rope_theta": 1e4, "factor": 4.0}}),
        ("rope_parameters: 7", {"rope_parameters": 7}),
    ],
)
def test_a_key_that_nothing_reads_is_refused_by_name(folder: Path, left: str, members: dict[str, Any]) -> None:
    change_config(folder, **members)
    with pytest.raises(CheckpointError, match="nothing reads in architecture 'llama'") as caught:
        require_consumed(open_checkpoint(folder))
    assert f"the configuration has {left}, which" in str(caught.value)
    assert "take it out of config.json" in str(caught.value)


def test_a_member_of_rope_counts_for_the_types_that_read_it(tmp_path: Path) -> None:
    config = tiny.config("hunyuan_v1_dense")
    require_consumed(config_only(tmp_path, config))
    other = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "alpha": 1000.0}
    with pytest.raises(CheckpointError, match=r"has rope_parameters\.alpha: 1000\.0, which"):
        require_consumed(config_only(tmp_path, {**config, "rope_parameters": other}))


def with_tensor(folder: Path, name: str) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, name: next(iter(tensors.values())).clone()}, path, {"format": "pt"})


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.sinks", "lm_head.bias",
    ],
)  # fmt: skip
def test_a_tensor_that_nothing_takes_is_refused_by_name(folder: Path, name: str) -> None:
    require_consumed(open_checkpoint(folder))
    with_tensor(folder, name)
    with pytest.raises(CheckpointError, match=f"takes the tensors {name}: "):
        require_consumed(open_checkpoint(folder))


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.rotary_emb.inv_freq", "model.embeddings.position_ids"])
def test_tensors_that_are_computed_anyway_are_no_matter(folder: Path, name: str) -> None:
    with_tensor(folder, name)
    require_consumed(open_checkpoint(folder))


def test_layers_of_another_kind_than_their_tensors_are_refused_by_name(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path, "jamba")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attn_layer_offset": 0}))
    with pytest.raises(CheckpointError, match=r"takes the tensors model\.layers\.0\.mamba\.A_log"):
        require_consumed(open_checkpoint(folder))


@pytest.mark.parametrize("verify", ["sample", "none"])
def test_a_compile_refuses_before_it_builds_anything(tmp_path: Path, verify: str) -> None:
    toy = Toy.make(tmp_path)
    with_tensor(toy.model, "model.norm.weight")
    with pytest.raises(CheckpointError, match=r"takes the tensors model\.norm\.weight"):
        toy.compile(verify=verify)
    assert toy.store.entries("executable") == [] and not toy.bundle.exists()


# What is listed is what transformers reads


REWRITTEN = {
    "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "rope_local_base_freq",
    "llama_4_scaling_beta", "sliding_window_pattern", "n_embed", "global_head_dim", "num_global_key_value_heads",
    "full_attention_interval", "block_ff_dim", "tie_embedding", "hybrid_override_pattern",
}  # fmt: skip
"""Keys that transformers turns into rope_parameters, layer_types, per_layer_config or others, which models read."""


@default_cases(16)
@pytest.mark.parametrize("kind", supported())
def test_every_key_that_counts_as_read_is_read(kind: str) -> None:
    seen: set[str] = set()

    before = PretrainedConfig.__dict__.get("__getattribute__")

    def look(self: Any, name: str) -> Any:
        other_names = type(self).attribute_map
        common = [common for common, own in other_names.items() if own == name]
        seen.update((name, other_names.get(name, name), *common))
        return (before or object.__getattribute__)(self, name)

    PretrainedConfig.__getattribute__ = look  # type: ignore[method-assign]
    try:
        config = model_config({**tiny.config(kind), "sliding_window": 5})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = AutoModelForCausalLM.from_config(config)
            model(model.dummy_inputs["input_ids"])
    finally:
        if before is None:
            del PretrainedConfig.__getattribute__  # one of object's would stay on the class, which tracing refuses
        else:
            PretrainedConfig.__getattribute__ = before  # type: ignore[method-assign]
    own = architecture(tiny.config(kind))
    assert READ - own.unread | own.reads <= seen | REWRITTEN


@pytest.mark.parametrize("kind", [kind for kind in ROPE if kind != "default"])
def test_every_member_of_rope_that_counts_as_read_is_read(kind: str) -> None:
    class Watched(dict[str, Any]):
        seen: set[str] = set()  # noqa: RUF012

        def __getitem__(self, name: str) -> Any:
            self.seen.add(name)
            return super().__getitem__(name)

        def get(self, name: str, default: Any = None) -> Any:
            self.seen.add(name)
            return super().get(name, default)

    sizes = [1.0] * 8
    config = model_config({**tiny.config("llama"), "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
    watched = Watched({
        "rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16, "beta_fast": 32,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "short_factor": sizes, "long_factor": sizes, "mscale": 1.0,
        "mscale_all_dim": 1.0, "truncate": True,
    })  # fmt: skip
    object.__setattr__(config, "rope_parameters", watched)
    ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=64)
    assert ROPE[kind] <= watched.seen


def test_the_rotary_parameters_that_transformers_writes_for_ministral_3_are_taken(tmp_path: Path) -> None:
    config = tiny.config("ministral3")
    rope = {**AutoConfig.for_model("ministral3").rope_parameters, "original_max_position_embeddings": 16}
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    require_consumed(open_checkpoint(tmp_path / "config.json"))
