"""What each family's file says holds of transformers' model; a new file is tested as it is found."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import transformers

from llmc.compiler import architectures
from llmc.compiler.architectures import supported
from llmc.compiler.architectures.shared.architectures import (
    PLAIN,
    architecture,
    architecture_or_plain,
    size_of,
)
from llmc.compiler.architectures.shared.base import Architecture
from llmc.compiler.architectures.shared.caches import cache_of
from llmc.compiler.architectures.shared.names import LM_HEADS
from llmc.compiler.architectures.shared.size import ModelSize
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.frontend.consumed import require_consumed, tensor_names
from llmc.compiler.frontend.skeleton import build_skeleton, model_config
from llmc.compiler.targets.xla.sharding import weight_shardings
from llmc.errors import CheckpointError
from tests.compiler import tiny
from tests.tiers import default_cases


def of(name: str) -> Architecture:
    return architecture({"model_type": name})


def test_the_table_lists_what_every_file_defines() -> None:
    files = {file.stem for file in (Path(architectures.__file__).parent).glob("*.py")} - {"__init__", "encoders"}
    defined = {name: file for file in files for name in import_module(f"{architectures.__name__}.{file}").ARCHITECTURES}
    assert defined == architectures.FILES


@default_cases(22)
@pytest.mark.parametrize("name", supported())
def test_the_class_is_transformers_own(name: str) -> None:
    assert getattr(transformers, of(name).model_class).config_class.model_type == name


@pytest.mark.parametrize("name", supported())
def test_the_tiny_configuration_is_tiny_and_whole(name: str) -> None:
    config = tiny.config(name)
    assert config["num_hidden_layers"] <= 4
    assert "vocab_size" not in of(name).tiny
    assert "model_type" not in of(name).tiny


@default_cases(22)
@pytest.mark.parametrize("name", supported())
def test_one_rule_names_how_each_weight_is_split(name: str) -> None:
    config = tiny.config(name)
    model = build_skeleton(config)
    shapes = {n: tuple(tensor.shape) for n, tensor in (*model.named_parameters(), *model.named_buffers())}
    for tensor in {*shapes, *tensor_names(config)}:
        for form in (tensor, re.sub(r"\.\d+\.", ".*.", tensor, count=1)):
            assert len([rule for rule in of(name).sharding if re.fullmatch(rule.pattern, form)]) == 1, form
    assert weight_shardings(shapes, config, 2).keys() == shapes.keys()


@default_cases(22)
@pytest.mark.parametrize("name", supported())
def test_sizes_are_the_models(name: str) -> None:
    config = tiny.config(name)
    named = build_skeleton(config).named_parameters()
    matrices = {n: p.numel() for n, p in named if p.dim() >= 2 and "norm" not in n}
    size = size_of(config, name)
    assert size.parameters == sum(matrices.values())
    names = of(name).names
    assert [w.count for w in size.weights if w.embed_lm_head] == [
        matrices[names.embedding] + matrices.get(names.lm_head, 0)
    ]
    assert size.cache_values == cache_of(config).token_values


@pytest.mark.parametrize("name", supported())
def test_the_embedding_and_the_head_are_known_to_be_tied_where_the_head_is_not_stored(name: str) -> None:
    names = of(name).names
    assert names.embedding in LM_HEADS[names.lm_head]


@pytest.mark.parametrize("name", supported())
def test_keys_in_common_terms_are_what_transformers_reads(name: str) -> None:
    own, config = of(name), tiny.config(name)
    built = model_config(config)
    for common, key in own.keys.items():
        assert getattr(built, key) == config[common]


def test_sizes_of_what_is_not_supported_are_a_plain_decoders() -> None:
    config = tiny.config("llama") | {"model_type": "ctrl"}
    assert architecture_or_plain(config) is PLAIN
    assert size_of(config, "config.json") == replace(ModelSize.of(config, "config.json"), cache=cache_of(config))
    with pytest.raises(CheckpointError, match=r"config.json: intermediate_size is None, not a size"):
        size_of({**config, "intermediate_size": None}, "config.json")


@pytest.mark.parametrize(("name", "refused"), [("qwen2", False), ("mistral", True)])
def test_a_key_that_nothing_reads_may_say_what_the_family_does_anyway(name: str, refused: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**tiny.config(name), "attention_bias": refused}))
    with pytest.raises(CheckpointError, match=f"attention_bias: {refused}, which nothing reads"):
        require_consumed(open_checkpoint(tmp_path / "config.json"))
    (tmp_path / "config.json").write_text(json.dumps({**tiny.config(name), "attention_bias": not refused}))
    require_consumed(open_checkpoint(tmp_path / "config.json"))
