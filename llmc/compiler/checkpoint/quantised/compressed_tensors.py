"""compressed-tensors: matrices P.weight [N, K], quantized by the scheme of their module.

    pack-quantized         P.weight_packed  int32 [N, K · bits/32]   integers minus the smallest, packed along K
    int-quantized          P.weight         int8 [N, K]
    float-quantized        P.weight         float8 e4m3 [N, K]
    naive-quantized        either of these
    nvfp4-pack-quantized   P.weight_packed  uint8 [N, K/2]           float4 e2m1, the first in the low half of a byte

P.weight_scale is [1], [N, 1] (channel), [N, K/group] or, for float8, one per tile (block). Asymmetric weights have
P.weight_zero_point in the scales' shape, as int8, or packed along N in pack-quantized. P.weight_shape is [N, K].
P.weight_g_idx int32 [K] (act-order of earlier versions) is the group of each input, unless it holds -1. nvfp4 has
float8 scales of 16 inputs, divided by P.weight_global_scale; twice a value is an integer of at most 12, so 8 bits hold
it exactly. Settings of activations change no weight and are ignored.

The reference multiplies in the dtype of the scales, mostly bfloat16; here values are computed in float32.

Source: compressed-tensors 0.20, compressors/ (pack_quantized, naive_quantized, nvfp4) and
quantization/lifecycle/forward.py; `weight_g_idx`: `_process_group` of earlier versions of the latter.

quantization_config states the scheme of a module's weight:

    config_groups  {name: {"targets": [..], "weights": {..}, "format": str?, "input_activations": {..}?}}
    ignore         [..]     modules that are not quantized
    format         str      default of groups without one

A target is a module's name, "re:" and a pattern that a name begins with, or a class ("Linear"). Names take precedence
over patterns, and patterns over classes. Source: compressed-tensors 0.20, quantization/quant_config.py and
utils/match.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.compiler.architectures.shared.block_form import BlockForm
from llmc.compiler.architectures.shared.names import EMBED_LM_HEAD, LM_HEADS
from llmc.compiler.checkpoint.base import FloatArray
from llmc.compiler.checkpoint.quantised import (
    ACTIVATIONS,
    DTYPES,
    QuantisedTensor,
    Reading,
    StoredTensors,
    stated_group,
    stated_number,
)
from llmc.compiler.checkpoint.quantised.floats import (
    E2M1_VALUES,
    E4M3,
    FLOAT8,
    Float8Tensor,
    low_and_high,
    stated_tile,
)
from llmc.compiler.checkpoint.quantised.integers import GroupedTensor, Order, QuantizedArray, order_in, unpack, words_of

_PATTERN = "re:"
_EMBEDDING = "Embedding"
_NONE: tuple[Any, ...] = (None, {}, [], False)


@dataclass(frozen=True)
class Scheme:
    """How the weights of some modules are stored; `weights` holds the stated fields (num_bits, type, strategy, …)."""

    layout: str
    weights: Mapping[str, Any]
    activations: bool
    """Whether activations are quantized as well, which changes no weight."""

    @property
    def strategy(self) -> str:
        """tensor, channel, group, tensor_group or block; by default by the group size."""
        stated = self.weights.get("strategy")
        if stated is None:
            group = self.weights.get("group_size")
            return "tensor" if group is None else "channel" if group == -1 else "group"
        return str(stated)


class Schemes:
    """The schemes of a folder by module. Raises CheckpointError for an invalid or unsupported quantization_config."""

    def __init__(self, stated: Mapping[str, Any], stored: StoredTensors) -> None:
        self._stored = stored
        groups, ignored = stated.get("config_groups"), stated.get("ignore") or []
        if not isinstance(groups, Mapping) or not groups or not _texts(ignored):
            raise stored.error("quantization_config: compressed-tensors needs config_groups, and ignore is a list")
        for name in ("transform_config", "sparsity_config"):
            self._require_none(name, stated.get(name))
        self._ignored: list[str] = ignored
        self._require_patterns(ignored)
        self._by_target: dict[str, Scheme] = {}
        for name, group in groups.items():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            targets: Any = group.get("targets") if isinstance(group, Mapping) else None
            if not isinstance(weights, Mapping) or not _texts(targets):
                raise stored.error(f"quantization_config: group {name!r:.60} has no weights or targets: fetch it again")
            self._require_patterns(targets)
            layout = str(group.get("format") or stated.get("format"))
            built = Scheme(layout, weights, bool(group.get("input_activations") or group.get("output_activations")))
            self._by_target |= dict.fromkeys(targets, built)
        self.activations = any(scheme.activations for scheme in self._by_target.values())
        self.activations |= bool(stated.get("kv_cache_scheme"))

    def _require_none(self, name: str, value: Any) -> None:
        if isinstance(value, Mapping) and value.get("format") == "dense":
            return
        if value not in _NONE:
            raise self._stored.error(
                f"quantization_config: {name} is {value!r:.60}, which is not supported and changes the weights"
            )

    def _require_patterns(self, targets: list[str]) -> None:
        for target in targets:
            try:
                re.compile(target.removeprefix(_PATTERN))
            except re.error as error:
                if target.startswith(_PATTERN):
                    raise self._stored.error(
                        f"quantization_config: target {target!r:.60}: {error}; fetch it again"
                    ) from error

    def of(self, module: str) -> Scheme:
        """The scheme of a quantized module. Raises CheckpointError if no group covers it."""
        if _first(module, self._ignored) is not None:
            raise self._stored.error(f"{module} is quantized, but quantization_config says to ignore it")
        target = _first(module, self._by_target)
        if target is None:
            wanted = _EMBEDDING if f"{module}.weight" in EMBED_LM_HEAD - LM_HEADS.keys() else "Linear"
            target = wanted if wanted in self._by_target else None
        if target is None:
            raise self._stored.error(f"{module} is quantized, but no group of quantization_config covers it")
        return self._by_target[target]


def _first(module: str, targets: Iterable[str]) -> str | None:
    """The target that equals or matches a module's name."""
    named = [t for t in targets if t == module]
    matching = (t for t in sorted(targets) if t.startswith(_PATTERN) and re.match(t.removeprefix(_PATTERN), module))
    return named[0] if named else next(matching, None)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


KIND = "compressed-tensors"
_PACKED, _SCALE, _PLAIN = ".weight_packed", ".weight_scale", ".weight"
_LEFT_OUT = (
    "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point", "q_scale", "k_scale",
    "v_scale", "q_zero_point", "k_zero_point", "v_zero_point",
)  # fmt: skip


def read_compressed_tensors(stated: Mapping[str, Any], stored: StoredTensors) -> Reading:
    """Read a folder's compressed-tensors."""
    schemes = Schemes(stated, stored)
    modules = {name.removesuffix(end) for end in (_PACKED, _SCALE) for name in stored.names(end)}
    modules |= {n.removesuffix(_PLAIN) for n in stored.names(_PLAIN) if stored.dtype(n) in ("I8", FLOAT8)}
    if not modules:
        raise stored.error(f"quantization_config says {KIND}, but no tensor ends with {_PACKED} or {_SCALE}")
    tensors = {}
    for module in sorted(modules):
        scheme = schemes.of(module)
        if scheme.layout not in LAYOUTS:
            raise stored.error(
                f"quantization_config: {KIND} format {scheme.layout!r:.60} is not supported; supported: "
                f"{', '.join(sorted(LAYOUTS))}. Use the unquantized checkpoint"
            )
        tensors[f"{module}.weight"] = LAYOUTS[scheme.layout](stored, module, scheme)
    left_out = frozenset(name for name in stored.names() if name.rpartition(".")[2] in _LEFT_OUT)
    return Reading(tensors, left_out, (ACTIVATIONS,) if left_out or schemes.activations else ())


class _Integers(GroupedTensor):
    """Integer weights: the scales, zero points and input order of this layout; subclasses read the weights."""

    def __init__(
        self, stored: StoredTensors, module: str, scheme: Scheme, quantized: str, shape: tuple[int, int], bits: int
    ) -> None:
        self._quantized, self._scales_at, self._zeros_at, self._order_at = (
            quantized,
            *(f"{module}.weight_{part}" for part in ("scale", "zero_point", "g_idx")),
        )
        rows, width = shape
        strategy = scheme.strategy
        if strategy not in ("tensor", "channel", "group"):
            raise stored.error(f"quantization_config: integers with strategy {strategy!r:.60} are not supported")
        size = scheme.weights.get("group_size") if strategy == "group" else -1
        groups = width // stated_group(size, stored, width, quantized)
        shapes = ((1,), (), (1, 1)) if strategy == "tensor" else ((rows, groups), *(((rows,),) if groups == 1 else ()))
        stored.require(quantized, self._scales_at, tuple(DTYPES), *shapes)
        if self._zeros_at in stored or scheme.weights.get("symmetric") is False:
            stored.require(quantized, self._zeros_at, ("I8", "I32"), (words_of(rows, bits), groups), *shapes)
        if self._order_at in stored or scheme.weights.get("actorder") in ("group", True):
            stored.require(quantized, self._order_at, ("I32", "I64"), (width,))
        beside = (self._scales_at, self._zeros_at, self._order_at, f"{module}.weight_shape")
        self.parts = (quantized, *(name for name in beside if name in stored))
        super().__init__(stored, f"{module}.weight", KIND, shape, bits, groups, stored.scales_of(self._scales_at))

    def read_scales(self) -> FloatArray:
        return np.broadcast_to(self._each(self.stored.floats(self._scales_at)), (self.shape[0], self.groups))

    def read_zeros(self) -> int | npt.NDArray[Any]:
        """Signed zero points count from the middle, like the weights."""
        middle = 1 << (self.bits - 1)
        if self._zeros_at not in self.stored:
            return middle
        zeros = self.stored.quantized(self._zeros_at)
        if self.stored.dtype(self._zeros_at) == "I32":
            return unpack(zeros.T, self.bits, self.shape[0]).T
        return np.broadcast_to(self._each(zeros).astype(np.int32) + middle, (self.shape[0], self.groups))

    def _each(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return values.reshape(-1, self.groups)

    def read_order(self) -> Order | None:
        return order_in(self.stored, self._order_at, self.shape[1], self.groups, unset=-1)


class _Packed(_Integers):
    def __init__(self, stored: StoredTensors, module: str, scheme: Scheme) -> None:
        bits = stated_number(scheme.weights, "num_bits", stored, tuple(range(1, 9)))
        quantized, shape_at = f"{module}{_PACKED}", f"{module}.weight_shape"
        stored.require(quantized, quantized, ("I32",))
        stored.require(quantized, shape_at, ("I64", "I32"), (2,))
        rows, width = (int(size) for size in stored.quantized(shape_at))
        if rows < 1 or width < 1:
            raise stored.error(
                f"{shape_at} says {[rows, width]}, not the shape of a matrix: fetch the checkpoint again"
            )
        stored.require(quantized, quantized, ("I32",), (rows, words_of(width, bits)))
        super().__init__(stored, module, scheme, quantized, (rows, width), bits)

    def read_quantized(self) -> QuantizedArray:
        return unpack(self.stored.quantized(self._quantized), self.bits, self.shape[1])


class _Bytes(_Integers):
    def __init__(self, stored: StoredTensors, module: str, scheme: Scheme) -> None:
        quantized = f"{module}.weight"
        stored.require(quantized, quantized, ("I8",))
        shape = stored.shape(quantized)
        if len(shape) != 2 or 0 in shape:
            raise stored.error(f"tensor {quantized} is {list(shape)} and quantized, but not a matrix: fetch it again")
        super().__init__(stored, module, scheme, quantized, (shape[0], shape[1]), 8)

    def read_quantized(self) -> QuantizedArray:
        return self.stored.quantized(self._quantized).view(np.uint8) ^ np.uint8(128)


class _Float4(GroupedTensor):
    def __init__(self, stored: StoredTensors, module: str, scheme: Scheme) -> None:
        self.parts = self._quantized, self._scales_at, self._global = (
            f"{module}{_PACKED}", f"{module}{_SCALE}", f"{module}.weight_global_scale",
        )  # fmt: skip
        stored.require(self._quantized, self._quantized, ("U8",))
        packed = stored.matrix(self._quantized)
        rows, width = packed[0], packed[1] * 2
        groups = width // stated_group(scheme.weights.get("group_size"), stored, width, self._quantized)
        stored.require(self._quantized, self._scales_at, (FLOAT8,), (rows, groups))
        stored.require(self._quantized, self._global, ("F32",), (1,), ())
        super().__init__(stored, f"{module}.weight", "nvfp4", (rows, width), 8, groups, "float32")

    def read_quantized(self) -> QuantizedArray:
        return E2M1_VALUES[low_and_high(self.stored.quantized(self._quantized))]

    def read_scales(self) -> FloatArray:
        with np.errstate(divide="ignore", invalid="ignore"):
            scales: FloatArray = E4M3[self.stored.quantized(self._scales_at)] / self.stored.floats(self._global) / 2
        return scales

    def read_zeros(self) -> int:
        return 128

    def _form(self, size: int, order: tuple[int, ...] = ()) -> BlockForm:
        return replace(super()._form(size, order), stored_bits=4, table="float4")


def _float8(stored: StoredTensors, module: str, scheme: Scheme) -> QuantisedTensor:
    weight = f"{module}.weight"
    stored.require(weight, weight, (FLOAT8,))
    width = stored.shape(weight)[-1]
    tile = {
        "tensor": lambda: None,
        "channel": lambda: (1, width),
        "group": lambda: (1, stated_group(scheme.weights.get("group_size"), stored, width, weight)),
        "block": lambda: stated_tile(scheme.weights.get("block_structure"), "block_structure", stored),
    }.get(scheme.strategy)
    if tile is None:
        raise stored.error(f"quantization_config: float8 with strategy {scheme.strategy!r:.60} is not supported")
    return Float8Tensor(stored, weight, f"{module}{_SCALE}", tile())


def _by_type(stored: StoredTensors, module: str, scheme: Scheme) -> QuantisedTensor:
    weight = f"{module}.weight"
    stored.require(weight, weight, ("I8", FLOAT8))
    return (_float8 if stored.dtype(weight) == FLOAT8 else _Bytes)(stored, module, scheme)


Layout = Callable[[StoredTensors, str, Scheme], QuantisedTensor]
LAYOUTS: Mapping[str, Layout] = {
    "pack-quantized": _Packed, "int-quantized": _Bytes, "float-quantized": _float8, "naive-quantized": _by_type,
    "nvfp4-pack-quantized": _Float4,
}  # fmt: skip
READERS = {KIND: read_compressed_tensors}
