"""Weights in int8 and fp8, and caches in other precisions than the step's, on XLA's targets."""

from __future__ import annotations

import json
import math
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from llmc.compiler.architectures.shared.size import Weights
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.bind import bind
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.compiler.targets import declared, open_target
from llmc.compiler.targets.xla.formats import QUANTIZED_DTYPES, described_as
from llmc.compiler.targets.xla.sharding import AXIS, describe, weight_shardings
from llmc.compiler.verification.verify import beyond
from llmc.compiler.weights.recipes import quantized, scales
from llmc.compiler.weights.stage import SCALE
from llmc.errors import CheckpointError, InputError, UnknownNameError
from llmc.runtime.bundle import Bundle
from llmc.runtime.cache_shape import CacheShape
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.base import Executor
from tests.compiler import tiny
from tests.compiler.compiled import Compiled
from tests.compiler.targets.xla.bucket_steps import flat_core, inputs, step_of
from tests.tiers import full

pytestmark = full

CASE = "llama-three-layers"
UP = "model.layers.*.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Rolled, so that scales are stacked too, with a cache in a quarter of float32's bytes."""
    requested = {"device": "xla", "quantize": "int8", "kv_cache_dtype": "fp8", "roll_layers": True}
    return Compiled.first(tmp_path_factory.mktemp("formats"), CASE, tiny.kinds_plan(), requested, verify="all")


def described(*layers: int) -> list[dict[str, Any]]:
    shapes = {f"model.layers.{i}.mlp.up_proj.weight": [8, 4] for i in layers} | {"model.norm.weight": [4]}
    found = [
        {"name": n, "transform": "bf16", "dtype": "bfloat16", "shape": s, "sources": [n]} for n, s in shapes.items()
    ]
    table = {"name": "model.rotary_emb.odd", "transform": "table", "dtype": "float32", "shape": [4, 4], "sources": []}
    return [*found, table]


class TestWhatIsQuantised:
    def test_matrices_are_two_inputs_and_all_else_is_as_it_was(self) -> None:
        built = described_as(rolled=False, quantize="fp8")
        assert built is not None
        found = {d["name"]: d for d in built(described(0))}
        name = "model.layers.0.mlp.up_proj.weight"

        assert found[name] == {**described(0)[0], "transform": "fp8_codes", "dtype": "float8_e4m3fn"}
        assert (found[name + SCALE]["shape"], found[name + SCALE]["dtype"]) == ([8], "float32")
        assert [d for d in found.values() if name not in d["name"]] == described(0)[1:]

    def test_rolled_layers_have_scales_of_all_layers(self) -> None:
        built = described_as(rolled=True, quantize="int8")
        assert built is not None
        found = {d["name"]: d for d in built(described(0, 1, 2))}
        assert (found[UP]["shape"], found[UP + SCALE]["shape"]) == ([3, 8, 4], [3, 8])
        assert found[UP]["sources"] == found[UP + SCALE]["sources"]

    def test_nothing_changes_where_nothing_is_requested(self) -> None:
        assert described_as(rolled=False, quantize="none") is None


@pytest.mark.parametrize("name", sorted(QUANTIZED_DTYPES))
def test_a_step_computes_what_it_computes_with_the_weights_that_quantized_weights_and_scales_stand_for(
    name: str,
) -> None:
    import jax
    import jax.numpy as jnp

    from llmc.compiler.targets.xla.step import QuantisedCore

    core, given = flat_core("decode"), inputs("decode")
    names, held, rounded = [], [], []
    for weight, array in zip(core.weights, given[6:], strict=True):
        names.append(weight)
        if array.ndim != 2:
            held.append(array)
            rounded.append(array)
            continue
        scale = scales(np.asarray(array), name)
        built = jnp.asarray(quantized(np.asarray(array), scale, name)).view(QUANTIZED_DTYPES[name])
        names.append(weight + SCALE)
        held += [built, jnp.asarray(scale)]
        rounded.append(built.astype(jnp.float32) * scale[:, None])
    quantised = QuantisedCore(core, names)

    assert quantised.weights == names
    mine = jax.jit(step_of(quantised, "decode"))(*given[:6], *held)
    theirs = jax.jit(step_of(core, "decode"))(*given[:6], *rounded)
    for one, other in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4, rtol=2e-4)


class TestSharding:
    SHAPES: ClassVar = {
        "model.layers.*.mlp.up_proj.weight": (2, 8, 4), "model.layers.*.mlp.up_proj.weight_scale": (2, 8),
        "model.layers.*.mlp.down_proj.weight": (2, 4, 8), "model.layers.*.mlp.down_proj.weight_scale": (2, 4),
        "lm_head.weight": (16, 4), "lm_head.weight_scale": (16,),
    }  # fmt: skip
    CONFIG: ClassVar = {"intermediate_size": 8, "vocab_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}

    def test_scales_lie_where_their_rows_lie(self) -> None:
        found = {name: s.dims for name, s in weight_shardings(self.SHAPES, self.CONFIG, 2).items()}
        assert found["model.layers.*.mlp.up_proj.weight_scale"] == (None, AXIS)
        assert found["model.layers.*.mlp.down_proj.weight"] == (None, None, AXIS)
        assert found["model.layers.*.mlp.down_proj.weight_scale"] == (None, None)
        assert found["lm_head.weight_scale"] == (AXIS,)

    def test_bytes_are_those_of_each_and_a_weight_counts_once(self) -> None:
        each = {name: 4 if name.endswith(SCALE) else 1 for name in self.SHAPES}
        cache = CacheShape.plain(2, 2, 4)
        found = describe(weight_shardings(self.SHAPES, self.CONFIG, 2), self.CONFIG, 2, cache, each)
        assert found["cache"] == "split by key/value heads"
        assert found["bytes"] == sum(math.prod(s) * each[n] for n, s in self.SHAPES.items())
        assert sum(rule["weights"] for rule in found["rules"].values()) == 3


class TestABundle:
    @full
    def test_it_is_verified_and_holds_a_byte_a_weight(self, compiled: Compiled) -> None:
        bundle = Bundle.open(compiled.path)
        placed = json.loads(bundle.files.read("weights.json"))

        assert compiled.result.verification["leak"] == 0
        assert placed[UP]["length"] == math.prod(placed[UP]["shape"])
        assert placed[UP + SCALE]["length"] == 4 * math.prod(placed[UP]["shape"][:2])
        assert bundle.manifest.options["kv_cache_dtype"] == "fp8"

    def test_a_prefix_travels_exactly_and_numbers_out_of_range_are_the_largest(self, compiled: Compiled) -> None:
        with closing(open_executor(Bundle.open(compiled.path))) as executor:
            assert isinstance(executor, Executor)
            assert executor.capabilities.cache_dtype == "bf16"
            assert executor.memory()["cache"] % 128 == 0
            random = np.random.default_rng(0)
            heads, size = 2, 16
            given = [random.normal(size=(heads, 5, size)).astype(np.float32) for _ in range(6)]
            given[0][0, 0, :2] = 1e4, -1e4
            executor.import_prefix(0, given)
            once = executor.export_prefix(0, 5)
            executor.import_prefix(1, once)
            for one, other, first in zip(once, executor.export_prefix(1, 5), given, strict=True):
                np.testing.assert_array_equal(one, other)
                np.testing.assert_allclose(one, np.clip(first, -448, 448), rtol=2**-4, atol=2**-10)
            assert once[0][0, 0, :2].tolist() == [448, -448]
            assert beyond(once, "fp8") == 2

    def test_a_configuration_alone_is_bound_to_the_same_weights(self, compiled: Compiled, tmp_path: Path) -> None:
        config = tmp_path / "config.json"
        config.write_bytes((compiled.model / "config.json").read_bytes())
        requested = CompileOptions.of(**{**compiled.requested, "verify": "none"})  # type: ignore[arg-type]
        built = compile_bundle(str(config), tmp_path / "a", compiled.plan, requested, compiled.store, lambda _: None)
        assert built.built == 0
        bind(tmp_path / "a", open_checkpoint(str(compiled.model)), tmp_path / "b", compiled.store)
        mine, theirs = (Bundle.open(path).manifest.files["weights"] for path in (tmp_path / "b", compiled.path))
        assert mine == theirs
        wider = tiny.write_model(tmp_path / "other", "llama")
        with pytest.raises(CheckpointError, match="do not match the configuration"):
            bind(tmp_path / "a", open_checkpoint(str(wider)), tmp_path / "c", compiled.store)


class TestOptions:
    def test_estimates_count_the_bytes_of_each_format(self) -> None:
        target = open_target("xla")
        options = target.configure(CompileOptions.of("xla", quantize="fp8", kv_cache_dtype="bf16"))
        assert target.costs.weight_bits(options, Weights(1000)) == 8
        assert (target.verification.cache_dtype(options), target.costs.cache_bytes(options)) == ("bf16", 2)
        plain = target.configure(CompileOptions.of("xla"))
        assert (target.costs.weight_bits(plain, Weights(1)), target.costs.cache_bytes(plain)) == (32, 4)

    def test_limits_are_the_sum_of_what_each_format_may_add(self) -> None:
        target = open_target("xla")
        found = target.verification.limits(
            target.configure(CompileOptions.of("xla", quantize="fp8", kv_cache_dtype="fp8"))
        )
        assert found.quality == "fp8 + fp8 KV cache"

    def test_a_cache_in_the_steps_own_dtype_is_no_option(self) -> None:
        options = open_target("xla").configure(CompileOptions.of("xla", dtype="bf16", kv_cache_dtype="bf16"))
        assert not options.own

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"dtype": "bf16", "kv_cache_dtype": "f32"}, "--kv-cache-dtype f32: keys and values of --dtype bf16"),
            ({"quantize": "int4"}, "--quantize int4 is not offered for device xla; offered: none, int8, fp8"),
            ({"quantize": "int8", "lowering": "torch-xla"}, "--quantize int8 works with --lowering jax"),
        ],
    )
    def test_what_cannot_be_is_refused(self, options: dict[str, object], message: str) -> None:
        with pytest.raises(InputError, match=message):
            open_target("xla").configure(CompileOptions.of("xla", **options))

    def test_the_flag_has_the_choices_and_the_help_of_all_devices_that_take_it(self) -> None:
        one = declared()["kv_cache_dtype"]
        assert {"cuda", "openvino", "tpu", "xla"} <= set(one.devices)
        choices = {"auto", "f16", "int8", "f32", "bf16", "fp8", "u8"}
        assert choices == set(one.option.choices) == set(one.option.metavar.split("|"))
        assert "openvino: Precision of the KV cache. Default: u8" in one.option.help

    def test_unknown_names_list_the_known_ones(self) -> None:
        with pytest.raises(UnknownNameError, match="bf16, f32, fp8"):
            open_target("xla").configure(CompileOptions.of("xla", kv_cache_dtype="fp7"))
        with pytest.raises(InputError, match="--kv-cache-dtype u8 is for openvino; xla takes f32, bf16, fp8"):
            open_target("xla").configure(CompileOptions.of("xla", kv_cache_dtype="u8"))
        with pytest.raises(UnknownNameError, match="fp8"):
            CompileOptions.of("xla", quantize="fp7")
