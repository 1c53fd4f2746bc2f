"""--kv-cache-dtype for ONNX Runtime's targets: who takes int8, who refuses it, and what it says of memory."""

from __future__ import annotations

from typing import Any

import pytest

from llmc.artifacts.bundle.kernel_sets import KERNEL_SETS
from llmc.buckets.bucket import Bucket
from llmc.buckets.limits import Limits
from llmc.compiler.architectures.shared.size import ModelSize
from llmc.compiler.estimates.footprint import Footprint
from llmc.compiler.options import CompileOptions
from llmc.compiler.targets import open_target
from llmc.compiler.targets.base import Deployment, shaping
from llmc.compiler.targets.onnxruntime.target import OnnxRuntimeTarget
from llmc.errors import InputError, LlmcError
from llmc.runtime.cache_shape import CacheShape, CacheTensor, key_value

LIMITS = Limits(1024, 8)
SIZE = ModelSize(4, 256, 512, 8, 2, 64, 1000, True)


@pytest.fixture(autouse=True)
def _avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnnxRuntimeTarget, "isa", lambda self: KERNEL_SETS[3].isa)


def configured(device: str = "onnxruntime", **options: Any) -> CompileOptions:
    return open_target(device).configure(CompileOptions.of(device, **options))


def test_int8_is_kept_and_auto_is_as_if_it_were_not_given_without_tiles() -> None:
    target = open_target("onnxruntime")
    coded, plain = configured(kv_cache_dtype="int8"), configured()
    assert configured(kv_cache_dtype="auto") == configured(kv_cache_dtype="f16") == plain
    assert "kv_cache_dtype" not in plain.extensions, "a manifest and a key would name it"
    assert shaping(target.description, coded) == {**shaping(target.description, plain), "kv_cache_dtype": "int8"}
    assert target.verification.limits(coded).quality == "int8 + int8 KV cache"  # type: ignore[union-attr]
    assert target.verification.limits(plain).quality == "int8"  # type: ignore[union-attr]


def test_bf16_is_kept_and_is_the_default_where_every_set_of_kernels_is_fast_so(monkeypatch: pytest.MonkeyPatch) -> None:
    target = open_target("onnxruntime")
    requested = configured(kv_cache_dtype="bf16")
    assert target.verification.limits(requested).quality == "int8 + bf16 KV cache"  # type: ignore[union-attr]
    assert (target.costs.cache_bytes(requested), target.verification.cache_dtype(requested)) == (2, "bf16")
    tiled = {"quantize": "int8", "cpu": "sapphirerapids", "verify": "none"}
    assert configured(**tiled) == configured(**tiled, kv_cache_dtype="bf16")
    assert "kv_cache_dtype" not in configured(**tiled, kv_cache_dtype="f16").extensions
    assert "kv_cache_dtype" not in configured(**tiled | {"cpu": "sapphirerapids,zen4"}).extensions
    zen4 = {"quantize": "int8", "cpu": "zen4"}
    assert configured(**zen4).get("kv_cache_dtype") is None, "nothing here could verify it"
    for fast in KERNEL_SETS[:2]:
        monkeypatch.setattr(OnnxRuntimeTarget, "isa", lambda self, fast=fast: fast.isa)
        assert configured().get("kv_cache_dtype") == configured(**zen4).get("kv_cache_dtype") == "bf16"
        assert configured(**zen4 | {"cpu": "zen4,icelake-server"}).get("kv_cache_dtype") is None
    assert configured(kernels="onnxruntime").get("kv_cache_dtype") is None


@pytest.mark.parametrize(
    ("device", "options", "why"),
    [
        ("onnxruntime", {"kernels": "onnxruntime"}, "--kv-cache-dtype int8 is for llmc's kernels: quantise"),
        ("onnxruntime", {"quantize": "none"}, "--kv-cache-dtype int8 is for llmc's kernels: quantise"),
        ("onnxruntime", {"specialise": True}, "--kv-cache-dtype int8 is for llmc's kernels: quantise"),
        ("onnxruntime", {"kv_cache_dtype": "int9"}, "unknown KV cache dtype 'int9'; known: auto, bf16, f16, int8"),
        (
            "onnxruntime",
            {"kv_cache_dtype": "u8"},
            "--kv-cache-dtype u8 is for openvino; onnxruntime takes auto, f16, bf16, int8",
        ),
        ("openvino", {}, "--kv-cache-dtype int8 is for cpu, onnxruntime; openvino takes u8, f32, bf16"),
        ("xla", {}, "--kv-cache-dtype int8 is for cpu, onnxruntime; xla takes f32, bf16, fp8"),
        ("neuron", {}, "--kv-cache-dtype is for .*onnxruntime.*; leave it out for neuron"),
    ],
)
def test_who_cannot_says_who_can(device: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(LlmcError, match=why):
        configured(device, **{"kv_cache_dtype": "int8"} | options)


@pytest.mark.parametrize(("requested", "engine"), [("int8", "onnxruntime"), ("u8", "openvino")])
def test_cpu_stands_for_the_engine_that_takes_it(requested: str, engine: str) -> None:
    pytest.importorskip("openvino")
    options = CompileOptions.of("cpu", kv_cache_dtype=requested)
    found = open_target("cpu").resolve(options, Deployment(LIMITS, {}, {}, []))
    assert (found.target.description.name, found.requested.get("kv_cache_dtype")) == (engine, requested)
    assert found.why == f"only {engine} takes --kv-cache-dtype"


def test_a_model_of_states_alone_has_no_keys_and_values_to_keep_so() -> None:
    target, options = open_target("onnxruntime"), configured(kv_cache_dtype="int8")
    state = CacheTensor(0, "conv", "state", (8, 3))
    with pytest.raises(InputError, match="--kv-cache-dtype int8: the model has recurrent states and no keys or values"):
        target.held_cache(CacheShape(1, (state,)), LIMITS, options)
    target.held_cache(CacheShape(2, (state, *key_value(1, 2, 64))), LIMITS, options)


def test_estimates_count_scales_and_say_how_many_sequences_fit() -> None:
    def cache(**options: Any) -> tuple[float, str, int]:
        target = open_target("onnxruntime")
        found = Footprint(SIZE, target, target.configure(CompileOptions.of("onnxruntime", **options)), LIMITS)
        (one,) = [e for e in found.estimates([Bucket("decode", 8, 1, 1024)]) if e.name == "KV cache"]
        assert one.value == 8 * found.sequence_bytes == 8 * 1024 * found.cache_token_bytes
        return one.value, one.source, found.cache_token_bytes

    values = 2 * 4 * 2 * 64
    assert cache()[2] == 2 * values
    held, source, token = cache(kv_cache_dtype="int8")
    assert token == values + 2 * 2 * 4 * 2
    assert source.endswith("× 1 bytes and 2 bytes of each scale; 15 fit where 16 bits hold 8")
    assert 15 * held / 8 <= cache()[0] < 16 * held / 8


def test_states_take_their_own_bytes_whatever_keys_and_values_take() -> None:
    cache = CacheShape(2, (CacheTensor(0, "conv", "state", (8, 3)), *key_value(1, 2, 64)))
    assert cache.nbytes(10, "f32", "int8") == 10 * 2 * 2 * 66 + 4 * 24
    assert cache.nbytes(10, "f32", "f16") == 10 * 2 * 2 * 64 * 2 + 4 * 24
    assert cache.nbytes(10, "f32", "another") == cache.nbytes(10, "f32")
