"""The architecture that docs/adding.md adds, as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llmc.artifacts.store.store import Store
from llmc.compiler.architectures import require_supported, supported
from llmc.compiler.architectures.shared.architectures import architecture, by_gguf_architecture, size_of
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.frontend.consumed import require_consumed, tensor_names
from llmc.compiler.frontend.skeleton import build_skeleton
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.compiler.targets.xla.sharding import AXIS, describe, weight_shardings
from llmc.errors import CheckpointError
from llmc.runtime.cache_shape import CacheShape
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.llm import BundleLLM
from llmc.testing.toy import VOCAB
from tests.compiler import tiny
from tests.compiler.architectures.dropped import drop_in
from tests.docs.commands import ROOT, section

TEXT = section(ROOT / "docs" / "adding.md", "Adding an architecture")
NAME, FILE = "seed_oss", "seed"


@pytest.fixture
def dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of the page lies among the families."""
    (text,) = re.findall(rf"^```python\n# {FILE}\.py\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    with pytest.raises(CheckpointError, match=f"'{NAME}' is not supported; supported: {', '.join(supported())}"):
        require_supported({"model_type": NAME})
    assert f'"{FILE}": ("{NAME}",),' in TEXT
    drop_in(NAME, FILE, text, tmp_path, monkeypatch)


@pytest.mark.usefixtures("dropped")
def test_a_family_whose_file_is_dropped_in_compiles_and_says_what_transformers_says(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "model", NAME)
    options = CompileOptions("cpu", quantize="none", verify="all")
    plan, store = tiny.tiny_plan(), Store(tmp_path / "store")
    result = compile_bundle(str(folder), tmp_path / "bundle", plan, options, store, lambda _: None)
    assert result.verification["top1"] == 1.0
    prompts = [[5, 80, 3, 200, 17, 9, 9, 31, 4], [7]]
    with BundleLLM(tmp_path / "bundle", threads=1) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    assert [o.outputs[0].token_ids for o in outputs] == [tiny.greedy(NAME, p, 8) for p in prompts]


@pytest.mark.usefixtures("dropped")
@pytest.mark.parametrize("keys", [{}, {"attention_bias": False}, {"attention_out_bias": True, "mlp_bias": True}])
def test_its_tensors_are_those_of_the_model(keys: dict[str, bool]) -> None:
    config = tiny.config(NAME) | keys
    assert tensor_names(config) == set(build_skeleton(config).state_dict())


@pytest.mark.usefixtures("dropped")
def test_what_its_file_does_not_say_is_refused(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "model", NAME)
    require_consumed(open_checkpoint(folder))
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"mlp_bias"', '"use_sliding_window": true, "mlp_bias"'))
    with pytest.raises(CheckpointError, match="use_sliding_window: True, which nothing reads in"):
        require_consumed(open_checkpoint(folder))


@pytest.mark.usefixtures("dropped")
def test_it_is_listed_and_sized_with_the_others() -> None:
    assert NAME in supported()
    assert architecture({"model_type": NAME}).model_class == "SeedOssForCausalLM"
    assert size_of(tiny.config(NAME), "config.json").vocabulary == VOCAB


def test_it_is_gone_after_a_test() -> None:
    assert NAME not in supported()
    assert NAME not in tiny.ARCHITECTURES


OWN = """
from llmc.compiler.architectures.shared.base import TINY, Architecture, Gguf
from llmc.compiler.architectures.shared.sharding import Rule
from llmc.compiler.architectures.shared.size import ModelSize

ARCHITECTURES = {
    "odd": Architecture(
        model_class="OddForCausalLM",
        gguf=Gguf("odd-in-gguf"),
        sharding=(Rule("all", r".*", 0, "vocab_size", "words", "all"),),
        size=lambda config, source: ModelSize(1, 2, 3, 4, 5, 6, 7, tied=True),
        tiny=TINY,
    )
}
"""


def test_a_familys_own_sizes_rules_and_name_in_gguf_files_are_the_ones_that_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop_in("odd", "odd_models", OWN, tmp_path, monkeypatch)
    assert size_of({"model_type": "odd"}, "config.json").vocabulary == 7
    assert by_gguf_architecture()["odd-in-gguf"] == ("odd",)
    found = weight_shardings({"anything": (8, 3)}, {"model_type": "odd", "vocab_size": 4}, 2)
    assert found["anything"].dims == (AXIS, None)
    config = {"model_type": "odd", "num_key_value_heads": 2}
    described = describe(found, config, 2, CacheShape.plain(1, 2, 4), {"anything": 4})
    assert described["rules"].keys() == {"all"}
