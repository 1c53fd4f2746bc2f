"""Checkpoints that embed or score: compiled, verified, and the same numbers as transformers and its pooling files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import AutoModel, AutoModelForSequenceClassification

import llmc
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.pipeline.encoding import plan_encoder, settled_task
from llmc.compiler.targets.encoder import open_encoder_target
from llmc.compiler.targets.openvino.encoder import OpenVinoEncoderTarget
from llmc.compiler.targets.openvino.precision import computes_in
from llmc.compiler.verification.encoding import LEAST_COSINE, MOST_LEAK
from llmc.errors import CheckpointError, DeviceError, InputError, UnknownNameError, VerificationError
from llmc.runtime.host import cpu_features
from llmc.testing.toy import write_toy_encoder
from tests.compiler.encoders_tiny import write_encoder, write_modules
from tests.tiers import default_cases, full

TEXTS = ["a", "a longer text, of more words", "some text", "the last one of all"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encoders")


@pytest.fixture(scope="module")
def embedding(folder: Path) -> Iterator[llmc.LLM]:
    write_encoder(folder / "bert", "bert")
    llmc.compile(
        folder / "bert",
        folder / "bert.llmc",
        device="openvino",
        dtype="f32",
        max_num_seqs=4,
        cache_dir=folder / "store",
    )
    with llmc.LLM(folder / "bert.llmc") as llm:
        yield llm  # type: ignore[misc]


def states(folder: Path, text: str) -> torch.Tensor:
    model = AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(torch.tensor([tokens(text)])).last_hidden_state[0]  # type: ignore[no-any-return]


def tokens(text: str) -> list[int]:
    from llmc.runtime.text.tokenizer import Tokenizer
    from llmc.testing.toy import tokenizer_json

    return Tokenizer(tokenizer_json().encode()).encode(text)


@full
def test_embeddings_are_the_pooled_states_of_transformers(folder: Path, embedding: llmc.LLM) -> None:
    found = embedding.embed(TEXTS)
    for text, one in zip(TEXTS, found, strict=True):
        wanted = torch.nn.functional.normalize(states(folder / "bert", text).mean(0), dim=0).numpy()
        assert np.allclose(one.outputs.embedding, wanted, atol=1e-5)
        assert one.prompt_tokens == len(text)
    assert embedding.bundle.manifest.verification["cosine"] > 0.99999


@full
def test_one_text_and_token_ids_give_the_same_vector(embedding: llmc.LLM) -> None:
    by_ids = embedding.embed(tokens(TEXTS[1]))[0].outputs.embedding
    assert np.allclose(embedding.embed(TEXTS[1])[0].outputs.embedding, by_ids, atol=1e-6)


def test_fewer_dimensions_are_the_first_ones_of_length_one(embedding: llmc.LLM) -> None:
    whole = np.array(embedding.embed(TEXTS[1])[0].outputs.embedding)
    few = np.array(embedding.embed(TEXTS[1], dimensions=8)[0].outputs.embedding)
    assert np.allclose(few, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)
    with pytest.raises(InputError, match=r"dimensions 33 must be in 1 … 32"):
        embedding.embed("a", dimensions=33)


def test_a_bundle_to_embed_neither_generates_nor_scores(embedding: llmc.LLM) -> None:
    with pytest.raises(InputError, match="a bundle to embed, which generates nothing"):
        embedding.generate("a")
    with pytest.raises(InputError, match="a bundle to embed, not to score"):
        embedding.score("a", "b")
    with pytest.raises(InputError, match="has no prompt 'query'"):
        embedding.embed("a", prompt_name="query")


def test_a_compile_says_what_came_from_the_store(folder: Path, embedding: llmc.LLM) -> None:
    again = llmc.compile(
        folder / "bert", folder / "again.llmc", device="openvino", dtype="f32", max_num_seqs=4,
        cache_dir=folder / "store",
    )  # fmt: skip
    assert (again.built, again.reused) == (0, 1)
    assert again.verification == embedding.bundle.manifest.verification


@default_cases(1)
@pytest.mark.parametrize(
    ("device", "dtype", "quantize", "quality"),
    [
        pytest.param("openvino", "bf16", "none", "bf16", marks=pytest.mark.full),
        ("openvino", "f32", "int8", "int8"),
        ("onnxruntime", "f32", "int8", "int8"),
    ],
)
def test_smaller_formats_stay_within_their_limits(
    folder: Path, embedding: llmc.LLM, device: str, dtype: str, quantize: str, quality: str
) -> None:
    bundle = folder / f"{device}.{quality}.llmc"
    requested: dict[str, Any] = {
        "device": device, "dtype": dtype, "quantize": quantize, "max_num_seqs": 4, "cache_dir": folder / "store",
    }  # fmt: skip
    if not computes_in(dtype, cpu_features()):
        with pytest.raises(DeviceError, match=f"--dtype {dtype}: this CPU has none of"):
            llmc.compile(folder / "bert", bundle, **requested)
        return
    built = llmc.compile(folder / "bert", bundle, **requested)
    assert built.reused == (quantize == "none"), "OpenVINO chooses bf16 when it opens the same model"
    assert built.verification["quality"] == quality
    assert LEAST_COSINE[quality] <= built.verification["cosine"] < 0.9999999, "it ran in float32"
    assert built.verification["leak"] <= MOST_LEAK
    with llmc.LLM(bundle) as llm:
        found = [one.outputs.embedding for one in llm.embed(TEXTS)]
    wanted = [one.outputs.embedding for one in embedding.embed(TEXTS)]
    assert not np.allclose(found, wanted, atol=1e-6)
    assert (np.array(found) * np.array(wanted)).sum(1).min() >= LEAST_COSINE[quality]


@full
def test_buckets_of_fixed_shapes_give_the_same_vectors(folder: Path, embedding: llmc.LLM) -> None:
    built = llmc.compile(
        folder / "bert", folder / "fixed.llmc", device="onnxruntime", max_num_seqs=2, specialise=True,
        cache_dir=folder / "store",
    )  # fmt: skip
    assert (built.built, built.reused) == (6, 0), "1 and 2 texts of 16, 32 and 64 tokens"
    assert built.choice == "one executable per bucket of texts × tokens"
    with llmc.LLM(folder / "fixed.llmc") as llm:
        found = [one.outputs.embedding for one in llm.embed(TEXTS)]
        assert llm.pooler.statistics.buckets == {(2, 32): 1, (2, 16): 1}
    assert np.allclose(found, [one.outputs.embedding for one in embedding.embed(TEXTS)], atol=1e-5)


@pytest.mark.usefixtures("embedding")
def test_a_device_without_a_form_for_encoders_is_refused_and_names_those_with_one(folder: Path) -> None:
    for device, said in (
        ("hpu", "--device hpu cannot embed or score; choose one of cpu, onnxruntime, openvino, tpu"),
        ("openvino:GPU", "--device openvino:GPU: models that embed or score take only --device openvino"),
    ):
        with pytest.raises(InputError, match=said):
            llmc.compile(folder / "bert", folder / "none.llmc", device=device, cache_dir=folder / "store")
    with pytest.raises(InputError, match="--specialise: one executable for all buckets"):
        llmc.compile(folder / "bert", folder / "none.llmc", device="openvino", specialise=True)
    with pytest.raises(InputError, match="--dtype bf16 is not offered for embedding and scoring on device onnxruntime"):
        llmc.compile(folder / "bert", folder / "none.llmc", device="onnxruntime", dtype="bf16")


def test_cpu_stands_for_the_first_engine_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    target, why = open_encoder_target("cpu")
    assert (target.name, why) == ("openvino", "openvino: the first installed CPU engine for models without a cache")
    monkeypatch.setattr(OpenVinoEncoderTarget, "packages", ("openvino_is_not_here",))
    target, why = open_encoder_target("cpu")
    assert (target.name, why) == ("onnxruntime", "onnxruntime: openvino_is_not_here is not installed here")


def test_asyncio_programs_get_the_same_vectors(folder: Path, embedding: llmc.LLM) -> None:
    async def run() -> None:
        async with llmc.AsyncLLM(folder / "bert.llmc") as built:
            found = await asyncio.gather(*(built.embed(text) for text in TEXTS))
            for text, (one,) in zip(TEXTS, found, strict=True):
                wanted = embedding.embed(text)[0].outputs.embedding
                assert np.allclose(one.outputs.embedding, wanted, atol=1e-6)
            assert built.stats.running == 0
            with pytest.raises(InputError, match="a bundle to embed, not to score"):
                await built.score("a", "b")
            with pytest.raises(InputError, match="a bundle to embed, which generates nothing"):
                await anext(built.generate("a"))

    asyncio.run(run())


@full
def test_scores_are_those_of_the_classifier(folder: Path) -> None:
    checkpoint = write_encoder(folder / "judge", "xlm_roberta", "score")
    built = llmc.compile(
        checkpoint, folder / "judge.llmc", device="openvino", dtype="f32", max_num_seqs=2, cache_dir=folder / "store"
    )
    assert built.verification["cosine"] > 0.99999
    with llmc.LLM(folder / "judge.llmc") as llm:
        found = llm.score("abc", ["def", "a longer document"])

    async def beside() -> None:
        async with llmc.AsyncLLM(folder / "judge.llmc") as built:
            assert (await built.score("abc", "def"))[0].outputs.score == pytest.approx(found[0].outputs.score, abs=1e-6)

    asyncio.run(beside())
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint).eval()
    for one, text in zip(found, ("abcdef", "abca longer document"), strict=True):
        with torch.no_grad():
            wanted = torch.sigmoid(model(torch.tensor([tokens(text)])).logits[0, 0])
        assert one.outputs.score == pytest.approx(float(wanted), abs=1e-5)


@pytest.mark.usefixtures("embedding")
def test_graphs_that_do_not_match_the_reference_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.runtime.executors.openvino.encoder import OpenVinoEncoder

    run = OpenVinoEncoder.encode
    monkeypatch.setattr(OpenVinoEncoder, "encode", lambda self, inputs, stream=0: run(self, inputs, stream)[:, ::-1])
    with pytest.raises(VerificationError, match=r"batch \d+ of \d+ tokens, row \d+ of \d+ tokens: cosine"):
        llmc.compile(
            folder / "bert", folder / "wrong.llmc", device="openvino", dtype="f32", max_num_seqs=3,
            cache_dir=folder / "store",
        )  # fmt: skip
    assert not (folder / "wrong.llmc").exists()


def bert(folder: Path) -> Path:
    folder.mkdir()
    source = folder.parent / "model"
    if not source.exists():
        write_encoder(source, "bert")
    for file in source.iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    write_modules(folder, 32)
    return folder


def test_a_pooling_file_that_names_what_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    wrong = bert(tmp_path / "a")
    (wrong / "1_Pooling" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"1_Pooling/config.json: no such file"):
        plan_encoder(open_checkpoint(wrong), "embed")
    write_modules(wrong, 48)
    with pytest.raises(CheckpointError, match="pools vectors of 48 numbers; the model's have 32"):
        plan_encoder(open_checkpoint(wrong), "embed")
    write_modules(wrong, 32, pooling_mode="attention")
    with pytest.raises(CheckpointError, match="pooling 'attention' is not one of cls, max, mean"):
        plan_encoder(open_checkpoint(wrong), "embed")
    entries = json.loads((wrong / "modules.json").read_text())
    entries[1]["path"] = "3_Pooling"
    (wrong / "modules.json").write_text(json.dumps(entries))
    with pytest.raises(CheckpointError, match="names the folder '3_Pooling', which is missing"):
        plan_encoder(open_checkpoint(wrong), "embed")
    entries[1]["type"] = "custom.Pooling"
    (wrong / "modules.json").write_text(json.dumps(entries))
    with pytest.raises(CheckpointError, match=r"'custom.Pooling' is custom code, which llmc does not run"):
        plan_encoder(open_checkpoint(wrong), "embed")


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ("{", "modules.json: cannot be read as a list of modules"),
        ('{"a": 1}', "modules.json: cannot be read as a list of modules"),
        (
            [{"idx": 0, "type": "sentence_transformers.models.CNN", "path": ""}],
            "module 0 is 'CNN', which llmc",
        ),
        ([{"idx": 0, "type": "sentence_transformers.models.Dense", "path": "../.."}], "is outside the checkpoint"),
        (
            [{"idx": 0, "type": "sentence_transformers.models.Transformer", "path": ""}],
            "exactly one Pooling has to follow",
        ),
        (
            [{"idx": 0, "type": "sentence_transformers.models.Dense", "path": "1_Pooling"}],
            "a dense layer|safet",
        ),
    ],
)
def test_modules_that_llmc_does_not_compute_are_refused(tmp_path: Path, entries: object, said: str) -> None:
    wrong = write_toy_encoder(tmp_path / "a")
    (wrong / "modules.json").write_text(entries if isinstance(entries, str) else json.dumps(entries))
    with pytest.raises(CheckpointError, match=said):
        plan_encoder(open_checkpoint(wrong), "embed")


def test_dense_layers_have_to_fit_each_other_and_their_weights(tmp_path: Path) -> None:
    wrong = write_toy_encoder(tmp_path / "a")
    listed = json.loads((wrong / "modules.json").read_text())
    listed.append({"idx": 3, "type": "sentence_transformers.models.Dense", "path": "3_Dense"})
    (wrong / "modules.json").write_text(json.dumps(listed))
    (wrong / "3_Dense").mkdir()

    def refused(width: int, **config: object) -> str:
        save_file({"linear.weight": np.ones((2, width), np.float32)}, wrong / "3_Dense" / "model.safetensors")
        (wrong / "3_Dense" / "config.json").write_text(json.dumps({"bias": False, **config}))
        with pytest.raises(CheckpointError) as caught:
            plan_encoder(open_checkpoint(wrong), "embed")
        return str(caught.value)

    assert "its weights are not those of a layer 8 → None" in refused(8, in_features=8)
    assert "its weights are not those of a layer 8 → 2" in refused(9, in_features=8, out_features=2)
    assert "a dense layer of 9 inputs follows a module with 8 outputs" in refused(9, in_features=9, out_features=2)
    assert "a dense layer with activation 'x'" in refused(8, activation_function="x")


@pytest.mark.usefixtures("embedding")
def test_a_reranker_without_a_head_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"the weights lack .*classifier.* that a model for --task score has"):
        llmc.compile(folder / "bert", folder / "none.llmc", task="score", device="openvino", cache_dir=folder / "store")


def test_prompts_that_are_not_there_and_lengths_that_are_too_long_are_refused(tmp_path: Path) -> None:
    wrong = bert(tmp_path / "a")
    said = {"prompts": {"query": "find: "}, "default_prompt_name": "passage"}
    (wrong / "config_sentence_transformers.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match="names the default prompt 'passage', but has query"):
        plan_encoder(open_checkpoint(wrong), "embed")
    (wrong / "config_sentence_transformers.json").unlink()
    with pytest.raises(InputError, match="--max-model-len 65 is above the 64 tokens"):
        plan_encoder(open_checkpoint(wrong), "embed", max_model_len=65)


def test_the_task_is_what_the_checkpoint_says_unless_it_is_given(folder: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(bert(tmp_path / "a"))
    assert settled_task(checkpoint, None) == "embed"
    assert settled_task(checkpoint, "score") == "score"
    assert settled_task(checkpoint, "generate") is None
    with pytest.raises(UnknownNameError, match="unknown task 'sing'; known: embed, generate, score"):
        settled_task(checkpoint, "sing")


def test_plans_are_of_one_dimension_where_one_text_is_a_batch(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(bert(tmp_path / "a"))
    shapes = [(b.batch, b.query) for b in plan_encoder(checkpoint, "embed", max_num_seqs=1).buckets]
    assert shapes == [(1, 16), (1, 32), (1, 64)]
    shapes = [(b.batch, b.query) for b in plan_encoder(checkpoint, "embed", max_num_seqs=2).buckets]
    assert shapes == [(1, 16), (1, 32), (1, 64), (2, 16), (2, 32), (2, 64)]
