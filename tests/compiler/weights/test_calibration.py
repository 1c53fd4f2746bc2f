"""4-bit codes that a text chooses: less error in what a model computes with them, and the bundle that has them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch

from llmc.artifacts.store.store import Store
from llmc.compiler.architectures.shared.block_form import BlockForm
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.checkpoint.base import WrappedCheckpoint, stored_forms
from llmc.compiler.checkpoint.calibrated import BLOCK, FORM, CalibratedCheckpoint, packed
from llmc.compiler.checkpoint.gguf_file import BLOCK_TYPES
from llmc.compiler.frontend.real_model import load_real_model
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.compiler.verification.accuracy import kl_divergence
from llmc.compiler.weights.calibration import LENGTH, TOKENS, Inputs, calibrate, gptq4, sequences_of
from llmc.compiler.weights.nbits import quantise_q4
from llmc.errors import CheckpointError, InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors import open_executor
from llmc.runtime.step import exact
from tests.compiler import tiny
from tests.tiers import full


def values(quantized: np.ndarray, scales: np.ndarray, minimums: np.ndarray) -> np.ndarray:
    return (quantized * scales[..., None] + minimums[..., None]).reshape(len(quantized), -1)


def test_products_of_what_was_seen_change_less_than_by_rounding() -> None:
    random = np.random.default_rng(0)
    mixed = random.normal(size=(128, 128)) * np.exp(random.normal(size=128))
    inputs = (random.normal(size=(2000, 128)) @ mixed).astype(np.float32)
    inputs[:, 5] = 0  # an input that never comes
    weight = random.normal(size=(48, 128)).astype(np.float32)
    built = values(*gptq4(weight, Inputs.of(inputs.T @ inputs), BLOCK))
    quantized, scales, offsets = quantise_q4(weight, BLOCK)
    rounded = values(quantized, scales, offsets - 8 * scales)
    error = [np.square(inputs @ (weight - other).T).sum() for other in (built, rounded)]
    assert error[0] < 0.5 * error[1]
    assert np.isfinite(built).all()
    assert np.square(weight - built).sum() > np.square(weight - rounded).sum(), "weights themselves are farther"


def test_quantized_weights_of_a_matrix_that_has_them_already_are_those() -> None:
    random = np.random.default_rng(1)
    quantized = random.integers(0, 16, (8, 2, BLOCK)).astype(np.uint8)
    quantized[..., :2] = 0, 15
    scales = np.full((8, 2), 0.25, np.float32)
    weight = values(quantized, scales, np.full((8, 2), -2, np.float32)).astype(np.float32)
    inputs = random.normal(size=(500, 2 * BLOCK)).astype(np.float32)
    found = gptq4(weight, Inputs.of(inputs.T @ inputs), BLOCK)
    np.testing.assert_array_equal(found[0], quantized)
    np.testing.assert_allclose(values(*found), weight, atol=1e-6)


def test_blocks_come_back_as_they_were_written(tmp_path: Path) -> None:
    model = open_checkpoint(tiny.write_model(tmp_path / "model", "llama"))
    name = "model.layers.0.self_attn.q_proj.weight"
    rows, columns = model.shape(name)
    random = np.random.default_rng(2)
    quantized = random.integers(0, 16, (rows, columns // BLOCK, BLOCK)).astype(np.uint8)
    scale, minimum = (random.normal(size=quantized.shape[:2]).astype(np.float32) for _ in range(2))
    (tmp_path / "blocks").write_bytes(b"\0" * 64 + packed(quantized, scale, minimum))
    found = CalibratedCheckpoint(model, tmp_path / "blocks", {name: (64, rows, columns)}, "a")
    blocks = found.quantised_blocks(name)
    assert blocks is not None
    for built, wanted in ((blocks.q, quantized), (blocks.scale, scale), (blocks.minimum, minimum)):
        np.testing.assert_array_equal(built, wanted)
    np.testing.assert_array_equal(found.tensor(name), model.tensor(name))
    assert (found.stored_form(name), stored_forms(found)) == (FORM, {name: FORM})
    assert found.quantised_blocks("model.norm.weight") is None
    other = CalibratedCheckpoint(model, tmp_path / "blocks", {}, "b")
    assert len({found.digest(), other.digest(), model.digest()}) == 3
    for bad in ((-1, rows, columns), (65, rows, columns), (64, rows * 2, columns // 2), (64.0, rows, columns)):
        with pytest.raises(CheckpointError, match=f"blocks of {name}"):
            CalibratedCheckpoint(model, tmp_path / "blocks", {name: bad}, "a")  # type: ignore[dict-item]


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_every_projection_is_calibrated_by_its_inputs_in_the_quantised_model(tmp_path: Path, family: str) -> None:
    model = open_checkpoint(tiny.write_model(tmp_path / "model", family))
    random, out = np.random.default_rng(3), io.BytesIO()
    sequences = random.integers(0, 250, (4, 20)).tolist()
    token_offsets = calibrate(model, sequences, out)
    whole = load_real_model(model)
    linear = {n: m for n, m in whole.named_modules() if isinstance(m, torch.nn.Linear) and ".layers." in n}
    wanted = {f"{n}.weight" for n, m in linear.items() if m.in_features % BLOCK == 0}
    assert token_offsets.keys() == wanted
    (tmp_path / "blocks").write_bytes(out.getvalue())
    calibrated = CalibratedCheckpoint(model, tmp_path / "blocks", token_offsets, "a")
    for before in (name for name in wanted if ".layers.0." in name):
        found = calibrated.quantised_blocks(before)
        assert found is not None and found.minimum is not None
        built = torch.from_numpy(values(found.q, found.scale, found.minimum))
        linear[before.removesuffix(".weight")].weight.data = built
    name = "model.layers.1.self_attn.k_proj.weight"
    seen: list[torch.Tensor] = []
    linear[name.removesuffix(".weight")].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    for tokens in sequences:
        whole(torch.tensor([tokens]), use_cache=False)
    inputs = torch.cat([x.reshape(-1, x.shape[-1]) for x in seen]).detach().numpy()
    quantized, _, _ = gptq4(model.tensor(name), Inputs.of(inputs.T @ inputs), BLOCK)
    blocks = calibrated.quantised_blocks(name)
    assert blocks is not None
    assert (blocks.q == quantized).mean() > 0.99, "sums of products in another order"


def test_a_text_of_few_tokens_still_makes_less_error_than_rounding_does_on_others() -> None:
    random = np.random.default_rng(5)
    mixed = random.normal(size=(256, 256)) * np.exp(random.normal(size=256))
    seen, other = ((random.normal(size=(count, 256)) @ mixed).astype(np.float32) for count in (300, 2000))
    weight = random.normal(size=(48, 256)).astype(np.float32)
    built = values(*gptq4(weight, Inputs.of(seen.T @ seen), BLOCK))
    quantized, scales, offsets = quantise_q4(weight, BLOCK)
    error = [np.square(other @ (weight - w).T).sum() for w in (built, values(quantized, scales, offsets - 8 * scales))]
    assert error[0] < 0.9 * error[1]


def test_weights_that_are_no_numbers_are_one_error(tmp_path: Path) -> None:
    model = open_checkpoint(tiny.write_model(tmp_path / "model", "llama"))

    class Damaged(WrappedCheckpoint):
        def fill(self, name: str, out: np.ndarray) -> None:
            super().fill(name, out)
            if name == "model.layers.1.mlp.down_proj.weight":
                out[3, 4] = np.nan

        def tensor(self, name: str) -> np.ndarray:
            built = super().tensor(name).copy()
            self.fill(name, built)
            return built

    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj\.weight: some weights are NaN"):
        calibrate(Damaged(model, "damaged", "x"), [[1, 2, 3]], io.BytesIO())


def test_what_is_stored_in_4_bits_stays_so(tmp_path: Path) -> None:
    model = open_checkpoint(tiny.write_model(tmp_path / "model", "llama"))
    kept = "model.layers.1.mlp.up_proj.weight"

    class Stored(WrappedCheckpoint):
        def stored_form(self, name: str) -> BlockForm | None:
            return BLOCK_TYPES["Q4_1"].form if name == kept or everything else None

    everything = False
    stored = Stored(model, "stored", "x")
    token_offsets = calibrate(stored, [[1, 2, 3]], io.BytesIO())
    assert kept not in token_offsets and kept.replace("up", "gate") in token_offsets
    everything = True
    with pytest.raises(CheckpointError, match="every projection is stored in 4-bit blocks already"):
        calibrate(stored, [[1, 2, 3]], io.BytesIO())


def test_sequences_of_a_text() -> None:
    assert [len(s) for s in sequences_of(range(600), 10_000)] == [LENGTH, LENGTH, 600 - 2 * LENGTH]
    assert [len(s) for s in sequences_of(range(100), 48)] == [48, 48]
    assert sum(map(len, sequences_of(range(10**6), 10_000))) == TOKENS
    assert sequences_of([], 48) == []


@full
@pytest.mark.parametrize("device", ["openvino", "onnxruntime"])
def test_a_bundle_of_calibrated_quantized_weights(tmp_path: Path, device: str) -> None:
    model = str(tiny.write_model(tmp_path / "model", "llama"))
    text = tmp_path / "text.txt"
    text.write_text("The keeper of the lighthouse wrote what he saw, and what he did not see. " * 40)
    store, kl = Store(tmp_path / "store"), {}
    prompt = np.random.default_rng(0).integers(0, 250, 24).tolist()
    wanted = load_real_model(open_checkpoint(model))(torch.tensor([prompt])).logits[0, -1].detach().numpy()
    for given in (None, "own", str(text)):
        options = CompileOptions.of(device, quantize="int4", calibrate=given, verify="none")
        built = compile_bundle(model, tmp_path / "bundle", tiny.tiny_plan(), options, store, lambda _: None)
        assert ("calibrate" in built.stages) == (given is not None)
        bundle = Bundle.open(tmp_path / "bundle")
        assert bundle.manifest.options.get("calibrate") == given
        executor = open_executor(bundle, threads=1)
        kl[given] = kl_divergence(wanted, executor.run(exact("prompt", [0], [prompt], [0]))[0])
        executor.close()
    assert len(set(kl.values())) == 3
    assert all(0 < found < 0.2 for found in kl.values())


def test_bad_texts_are_one_error(tmp_path: Path) -> None:
    model = str(tiny.write_model(tmp_path / "model", "llama"))

    def compiled(given: str, quantize: str = "int4", device: str = "openvino", **more: object) -> None:
        options = CompileOptions.of(device, quantize=quantize, calibrate=given, **more)
        compile_bundle(model, tmp_path / "b", tiny.tiny_plan(), options, Store(tmp_path / "s"), lambda _: None)

    (tmp_path / "empty").write_text("")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="--calibrate: the text has 0 tokens"):
        compiled(str(tmp_path / "empty"))
    with pytest.raises(InputError, match="cannot be read as UTF-8 text"):
        compiled(str(tmp_path / "bytes"))
    with pytest.raises(InputError, match=r"cannot be read as UTF-8 text .*; name a file, or own"):
        compiled(str(tmp_path / "none"))
    with pytest.raises(InputError, match="--calibrate is for --quantize int4, and this is int8"):
        compiled("own", "int8")
    with pytest.raises(InputError, match="--calibrate has a scale for each 32 inputs; leave out --group-size"):
        compiled("own", group_size=64)
    with pytest.raises(InputError, match="calibrate"):
        compiled("own", "none", "hpu")
