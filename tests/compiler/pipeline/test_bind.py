"""Weights for a bundle of a configuration alone: checked, made once, and then a bundle as any other."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import llmc
from llmc.artifacts.bundle.manifest import read_manifest
from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.store.store import Store
from llmc.buckets.limits import Limits
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline import bind as binding
from llmc.compiler.pipeline.bind import bind, bound
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.compiler.stages import StageReport
from llmc.errors import ArtifactError, CapacityError, CheckpointError, InputError
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.llm import BundleLLM
from llmc.testing.toy import TEMPLATE, toy_plan
from tests.artifacts.helpers import files_below, flip
from tests.compiler.checkpoint.writers import CONFIG, TOKENS, weights, write_folder, write_gguf
from tests.tiers import full

PLAN = toy_plan([(1, 16, 0), (1, 16, 16)], [(2, 32)], Limits(32, 2, 16, 8))
PROMPTS = [[5, 8, 3], [2, 13, 7, 9, 9, 11, 4], [12]]
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
Tensors = dict[str, np.ndarray]


@dataclass
class Case:
    """A bundle of a configuration alone, and the checkpoint that it is for."""

    model: Path
    unbound: Path
    store: Store

    def compile(self, model: Path, output: Path, verify: str = "none") -> Path:
        options = CompileOptions(device="hpu", verify=verify)
        compile_bundle(str(model), output, PLAN, options, self.store, lambda _: None)
        return output


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("bind")
    created = Case(write_folder(folder / "llama"), folder / "unbound", Store(folder / "store"))
    created.compile(created.model / "config.json", created.unbound)
    return created


def tokens(bundle: Path) -> list[list[int]]:
    with BundleLLM(bundle, threads=1) as llm:
        return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)]


# What comes out


@full
def test_a_bound_bundle_generates_what_the_ordinary_bundle_does(case: Case, tmp_path: Path) -> None:
    created = bind(case.unbound, open_checkpoint(case.model), tmp_path / "made", case.store)
    assert created == tmp_path / "made"
    ordinary = case.compile(case.model, tmp_path / "ordinary", "all")
    assert tokens(created) == tokens(ordinary)
    mine, other = read_manifest(created), read_manifest(ordinary)
    for name in ("weights", "weights.json"):
        assert mine.files[name] == other.files[name]
    assert mine.model == other.model
    assert [e.blob for e in mine.executables] == [e.blob for e in other.executables]


def test_the_manifest_is_the_old_one_with_the_weights_and_where_they_come_from(case: Case, tmp_path: Path) -> None:
    old = read_manifest(case.unbound)
    new = read_manifest(bind(case.unbound, open_checkpoint(case.model), tmp_path / "made", case.store))
    assert old.is_unbound and not new.is_unbound
    assert set(new.files) - set(old.files) == {"weights", "weights.json"}
    assert [e.key for e in new.executables] == [e.key for e in old.executables]
    provenance = new.provenance
    assert (provenance["model"], provenance["checkpoint"]) == ("llama", open_checkpoint(case.model).digest())
    assert provenance["bound"] == {
        "manifest": old.digest, "model": "config.json", "checkpoint": old.provenance["checkpoint"],
    }  # fmt: skip
    names = [d["name"] for d in provenance["buildDefinition"]["resolvedDependencies"]]
    assert names[:3] == ["checkpoint/config.json", "checkpoint/model.safetensors", "configuration/config.json"]
    assert BundleFiles.open(tmp_path / "made").verify() == []


def test_a_gguf_file_can_be_the_weights(case: Case, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    created = bind(case.unbound, open_checkpoint(file), tmp_path / "made", case.store)
    assert tokens(created) == tokens(bound(case.unbound, str(case.model), case.store))
    manifest = read_manifest(created)
    assert manifest.model["name"] == open_checkpoint(file).name
    assert "tokenizer.json" in manifest.files, "the bundle had none"


def test_the_tokenizer_of_the_bundle_stays_where_it_has_one(case: Case, tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({token: index for index, token in enumerate(TOKENS)}, TOKENS[0])).to_str()
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(words)
    unbound = case.compile(folder / "config.json", tmp_path / "unbound")
    other = write_folder(tmp_path / "other")
    (other / "tokenizer.json").write_text(words.replace("{", "{ ", 1))
    (other / "chat_template.jinja").write_text(TEMPLATE)
    created = read_manifest(bind(unbound, open_checkpoint(other), tmp_path / "made", case.store))
    assert created.files["tokenizer.json"] == read_manifest(unbound).files["tokenizer.json"]
    assert "chat_template.jinja" in created.files


def test_a_checkpoint_with_more_tensors_is_fine(case: Case, tmp_path: Path) -> None:
    more = weights() | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    created = bind(case.unbound, open_checkpoint(write_folder(tmp_path / "more", more)), tmp_path / "made", case.store)
    assert tokens(created) == tokens(bound(case.unbound, str(case.model), case.store))


def test_layers_that_are_stacked_come_from_one_tensor_each(case: Case, tmp_path: Path) -> None:
    described = json.loads(BundleFiles.open(case.unbound).read("tensors.json"))
    (one,) = (t for t in described if t["name"] == "model.layers.0.mlp.up_proj.weight")
    stacked = {
        **one, "name": "model.layers.*.mlp.up_proj.weight", "shape": [2, *one["shape"]],
        "sources": [f"model.layers.{i}.mlp.up_proj.weight" for i in range(2)],
    }  # fmt: skip
    checkpoint = open_checkpoint(case.model)
    with BundleFiles.open(case.unbound) as files:
        binding.require_match(files, [stacked], checkpoint)
        stacked["shape"][1] += 1
        with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.up_proj\.weight is \[96, 64\].* \[97, 64\]"):
            binding.require_match(files, [stacked], checkpoint)


# What does not match


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def other_shape(name: str, *shape: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: np.zeros(shape, np.float32)})


def wider(tensors: Tensors) -> None:
    for name, value in list(tensors.items()):
        if ".mlp." in name:
            tensors[name] = np.zeros([n + 1 if n == 96 else n for n in value.shape], np.float32)


UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (without(UP), {}, f"{UP} is missing; name its own"),
        (other_shape(UP, 95, 64), {}, rf"{UP} is \[95, 64\], the bundle needs \[96, 64\]; name"),
        (wider, {"intermediate_size": 97}, r"intermediate_size is 97, the bundle needs 96; .* \(and 4 more\)"),
        (
            other_shape("model.embed_tokens.weight", len(TOKENS) + 1, 64), {"vocab_size": len(TOKENS) + 1},
            r"vocab_size is 15, the bundle needs 14; model\.embed_tokens\.weight is \[15, 64\]",
        ),
        (without("none"), {"rope_theta": 500.0}, r"rope_parameters is \{.*500.*\}, the bundle needs \{.*10000"),
        (without("none"), {"rms_norm_eps": 1e-6}, r"rms_norm_eps is 1e-06, the bundle needs 1e-05"),
        (without("none"), {"num_key_value_heads": 4, "num_attention_heads": 8}, r"kv_heads is 4, the bundle needs 2"),
        (without("none"), {"model_type": "mistral"}, "architecture is 'mistral', the bundle needs 'llama'"),
        (
            other_shape("lm_head.weight", len(TOKENS), 64), {"tie_word_embeddings": False},
            r"lm_head\.weight is a separate tensor",
        ),
    ],
    ids=["missing", "shape", "wider", "vocabulary", "rope", "epsilon", "heads", "architecture", "untied"],
)  # fmt: skip
def test_weights_of_another_model_are_refused_with_the_first_differences(
    case: Case, tmp_path: Path, change: Callable[[Tensors], object], config: dict[str, Any], message: str
) -> None:
    tensors = {"none": np.zeros(1, np.float32), **weights()}
    change(tensors)
    folder = write_folder(tmp_path / "other", tensors)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    with pytest.raises(CheckpointError, match=r"do not match the configuration that .*unbound was compiled") as raised:
        bind(case.unbound, open_checkpoint(folder), tmp_path / "made", case.store)
    assert raised.match(message)
    assert not (tmp_path / "made").exists()


def test_weights_of_more_than_the_model_takes_are_refused(case: Case, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "other", {"model.layers.0.self_attn.sinks": np.zeros(1, np.float32), **weights()})
    with pytest.raises(CheckpointError, match=r"takes the tensors model\.layers\.0\.self_attn\.sinks"):
        bind(case.unbound, open_checkpoint(folder), tmp_path / "made", case.store)
    assert not (tmp_path / "made").exists()


def test_a_bundle_with_weights_takes_no_others(case: Case, tmp_path: Path) -> None:
    created = bind(case.unbound, open_checkpoint(case.model), tmp_path / "made", case.store)
    for again in (
        lambda: bound(created, str(case.model), case.store),
        lambda: bind(created, None, created, case.store),
    ):  # type: ignore[arg-type]
        with pytest.raises(InputError, match="made already has weights; leave them out"):
            again()


def test_a_configuration_is_no_weights(case: Case, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is only a configuration and has no weights to bind"):
        bound(case.unbound, str(case.model / "config.json"), case.store)


@pytest.mark.parametrize(
    "content",
    [b"{}", b"[1]", b'[{"name": "a"}]', b'[{"name": "a", "transform": "dense", "dtype": "x", "shape": 3}]', b"["],
)
def test_a_description_that_is_none_is_an_artifact_error(
    case: Case, tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = BundleFiles.read
    monkeypatch.setattr(BundleFiles, "read", lambda self, name: content if name == "tensors.json" else read(self, name))
    with pytest.raises(ArtifactError, match=r"tensors\.json"):
        bind(case.unbound, open_checkpoint(case.model), tmp_path / "made", case.store)
    assert not (tmp_path / "made").exists()


# In the store


def built(store: Store, run: Callable[[Callable[[StageReport], None]], Path]) -> tuple[Path, set[str]]:
    names: set[str] = set()
    path = run(lambda r: names.add(r.name) if r.seconds is not None and not r.cached else None)
    return path, names


def test_binding_twice_makes_the_bundle_once(case: Case) -> None:
    first = bound(case.unbound, str(case.model), case.store)
    marked = (first / "manifest.json").stat()
    again, names = built(case.store, lambda report: bound(case.unbound, str(case.model), case.store, report))
    assert (again, names) == (first, set())
    assert (again / "manifest.json").stat().st_ino == marked.st_ino
    assert first.parent == case.store.layout.bundles


def test_another_folder_takes_the_weights_file_from_the_store(case: Case, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(case.model)
    bind(case.unbound, checkpoint, tmp_path / "one", case.store)
    two, names = built(case.store, lambda report: bind(case.unbound, checkpoint, tmp_path / "two", case.store, report))
    assert names == set()
    assert read_manifest(two) == read_manifest(tmp_path / "one")


def test_a_bound_bundle_that_was_damaged_is_built_again(case: Case, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    created = bound(case.unbound, str(case.model), store)
    blob = created / "blobs/sha256" / read_manifest(created).files["weights"][7:]
    blob.chmod(0o644)
    flip(blob)
    assert bound(case.unbound, str(case.model), store) == created
    assert BundleFiles.open(created).verify() == []


def test_other_weights_make_another_bundle(case: Case, tmp_path: Path) -> None:
    other = write_folder(tmp_path / "llama", weights(1))
    created = [bound(case.unbound, str(model), case.store) for model in (case.model, other)]
    assert created[0] != created[1]
    assert tokens(created[0]) != tokens(created[1])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), CapacityError("full")])
def test_a_bind_that_is_cut_off_leaves_nothing(
    case: Case, tmp_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store")

    def cut(*_: object) -> None:
        raise error

    monkeypatch.setattr("llmc.compiler.weights.recipes._bytes", cut)
    with pytest.raises(type(error)):
        bound(case.unbound, str(case.model), store)
    assert list(store.layout.bundles.glob("*")) == []
    assert [e.key.kind for e in store.entries() if not e.key.is_local] == []
    monkeypatch.undo()
    assert tokens(bound(case.unbound, str(case.model), store))


def test_a_full_disk_leaves_no_bundle(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("llmc.artifacts.bundle.writer._put", full)
    with pytest.raises(CapacityError):
        bind(case.unbound, open_checkpoint(case.model), tmp_path / "place" / "made", case.store)
    assert files_below(tmp_path) == []


# Whoever opens it


def test_llm_takes_weights_for_a_bundle_and_for_a_configuration(
    case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(case.store.root))
    expected = tokens(bound(case.unbound, str(case.model), case.store))
    with llmc.LLM(model=case.unbound, weights=case.model, threads=1) as llm:
        assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)] == expected
    with llmc.LLM(model=case.model / "config.json", device="hpu", weights=case.model, threads=1, plan=PLAN) as llm:
        assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)] == expected


def test_binding_imports_neither_torch_nor_transformers(case: Case, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from llmc.artifacts.store.store import Store; "
        "from llmc.compiler.pipeline.bind import bound; "
        f"bound(Path({str(case.unbound)!r}), {str(case.model)!r}, Store({str(tmp_path)!r})); "
        "assert not {'torch', 'transformers', 'jax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
