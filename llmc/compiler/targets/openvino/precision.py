"""The precisions of OpenVINO's CPU plugin, for storage and computing, and their settings; imports no OpenVINO."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from llmc.errors import DeviceError, InputError

GROUPS: Mapping[str, tuple[int, ...]] = {"none": (0,), "int8": (0, 32, 64, 128), "int4": (32, 64, 128), "keep": (32,)}
"""Allowed group sizes by quantization, the default first; 0 is the whole row."""

DTYPES: Mapping[str, tuple[str, ...]] = {
    "none": ("f32", "bf16", "f16"), "int8": ("f32", "bf16"), "int4": ("f32", "bf16"), "keep": ("f32", "bf16"),
}  # fmt: skip
"""Precisions of everything else, by quantization."""

CACHES: Mapping[str, tuple[str, ...]] = {"f32": ("u8", "f32"), "bf16": ("u8", "bf16"), "f16": ("u8",)}
"""KV cache precisions that the CPU plugin's attention reads, by compute precision."""

ACTIVATIONS: Mapping[str, int] = {"none": 0, "int8": 32, "int4": 32, "keep": 32}
"""Default group size of activations that matmuls quantize at run time; 0: none."""

MIXED = "int8"
"""The quantization whose default groups depend on the shape of a paged model."""

PAGED_INT8 = (64, 64)
"""int8 groups of weights and activations in a paged model for every shape.

Prefill is 1.2× faster than with whole rows and 32, at the same KL divergence (benchmarks/RESULTS.md).
"""

STEP_INT8 = (0, 32)
"""The same in a paged model with a fixed number of decode rows: 8 rows are faster with a scale for a whole row."""

FEW_ROWS = 2
"""Up to this many decode rows, unquantized activations are faster (0.85 and 0.93 of the time) and more exact."""

ACTIVATION_GROUPS = (16, 32, 64, 128)
"""Allowed group sizes of activations; one that does not divide the weights' group makes OpenVINO quantize none."""

INSTRUCTIONS: Mapping[str, tuple[str, ...]] = {
    "f32": (), "bf16": ("avx512_bf16", "amx_bf16", "avx_ne_convert"),
    "f16": ("avx512_fp16", "avx_ne_convert", "asimdhp"),
}  # fmt: skip
"""Instruction sets of which the CPU plugin needs one to compute in a precision.

Without one it silently takes another: bf16 becomes f32, and f16 becomes bf16 or f32.
"""


def group_of(quantize: str, group: int | None) -> int:
    """Return `group`, or the default of GROUPS for None. Raises InputError, listing those offered, for another."""
    if group is None:
        return GROUPS[quantize][0]
    if group not in GROUPS[quantize]:
        offered = "; ".join(f"{q} in groups of {', '.join(map(str, g))}" for q, g in GROUPS.items() if g != (0,))
        raise InputError(
            f"openvino does not offer {quantize} in groups of {group}; it offers {offered} (0: whole rows)"
        )
    return group


def activations_of(quantize: str, group: int, activations: int | None) -> int:
    """Return `activations`, or the default of ACTIVATIONS for None, over weights in groups of `group`.

    Raises InputError, listing those offered, for another, and for one that does not divide the group.
    """
    if activations is None:
        return ACTIVATIONS[quantize]
    offered = [n for n in ACTIVATION_GROUPS if quantize != "none" and not (group and group % n)]
    if activations not in (0, *offered):
        held = f"{quantize} in groups of {group}" if group else quantize
        raise InputError(
            f"openvino does not quantise activations in groups of {activations} over weights in {held}; it offers "
            f"{', '.join(map(str, (0, *offered)))} (0: not at all)"
        )
    return activations


def groups_of(quantize: str, group: int | None, activations: int | None, rows: int | None = None) -> tuple[int, int]:
    """Return the group sizes of weights and of activations in a paged model of `rows` decode rows, None for any.

    Requested sizes are kept; int8 without either has the fastest for the shape. Raises the InputErrors of group_of and
    activations_of.
    """
    if quantize == MIXED and group is None and activations is None:
        if rows is None:
            return PAGED_INT8
        return (STEP_INT8[0], 0) if rows <= FEW_ROWS else STEP_INT8
    held = group_of(quantize, group)
    return held, activations_of(quantize, held, activations)


def properties(
    quantize: str, dtype: str = "f32", cache: str | None = None, activations: int | None = None
) -> dict[str, str]:
    """Return OpenVINO's settings that a format's numbers were measured with, and belong to.

    `cache`: KV cache precision; None is float32 where everything else is, else u8. `activations`: as in ACTIVATIONS,
    whose value is the default; it has to divide the group of the weights, or OpenVINO quantizes none. Float32
    throughout gives the reference's logits. Raises InputError for a cache that attention cannot read.
    """
    if cache is None:
        cache = "f32" if quantize == "none" and dtype == "f32" else "u8"
    if cache not in CACHES[dtype]:
        raise InputError(
            f"openvino's attention in {dtype} reads no KV cache in {cache}; with --dtype {dtype} it reads "
            f"{', '.join(CACHES[dtype])}"
        )
    activations = ACTIVATIONS[quantize] if activations is None else activations
    return {
        "INFERENCE_PRECISION_HINT": dtype,
        "KV_CACHE_PRECISION": cache,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(activations),
    }


def computes_in(dtype: str, isa: Collection[str]) -> bool:
    """Whether a CPU of the instruction sets `isa` (runtime/host.py) computes in `dtype`."""
    needed = INSTRUCTIONS[dtype]
    return not needed or not set(needed).isdisjoint(isa)


def require_precision(dtype: str, isa: Collection[str]) -> None:
    """Raise DeviceError, naming the supported precisions, unless `computes_in` holds."""
    if not computes_in(dtype, isa):
        works = ", ".join(d for d in INSTRUCTIONS if computes_in(d, isa))
        needed = ", ".join(INSTRUCTIONS[dtype])
        raise DeviceError(
            f"--dtype {dtype}: this CPU has none of {needed}, and OpenVINO would silently use another "
            f"precision; choose one of {works}, or --quantize int8, int4 or keep to save memory"
        )
