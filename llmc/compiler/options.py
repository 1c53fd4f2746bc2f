"""What a compile was asked for."""

from __future__ import annotations

from dataclasses import dataclass

from llmc.errors import InputError, UnknownNameError

QUANTISATIONS = ("none", "int8", "int4", "keep")
DTYPES = ("auto", "f32", "bf16", "f16")
VERIFY = ("sample", "all", "none")
MAX_TOP_K = 256
EXTENSIONS: dict[str, int | str | None] = {
    "sample_top_k": 0, "tensor_parallel": 1, "lowering": "jax", "roll_layers": None, "cache_slots": None,
    "kv_cache_dtype": None, "group_size": None, "activation_group_size": None, "specialise_memory": None,
    "starter": False, "max_memory": None, "max_start": None, "kernels": None,
}  # fmt: skip
"""Options that are named where they are used, and not otherwise: each with its default."""

XLA_OPTIONS = ("tensor_parallel", "lowering", "roll_layers", "cache_slots")
"""Those that only targets that compile with XLA take."""

OPENVINO_OPTIONS = ("kv_cache_dtype", "group_size", "activation_group_size", "specialise_memory", "starter")
"""Those that only the OpenVINO target takes."""

CPU_OPTIONS = ("max_memory", "max_start")
"""Limits that `--device cpu` chooses an engine by."""

ONNXRUNTIME_OPTIONS = ("kernels",)
"""Those that only the target that runs on ONNX Runtime takes."""

KERNELS = ("llmc", "onnxruntime")
KV_CACHE_DTYPES = ("u8", "f32", "bf16")
LOWERINGS = ("jax", "torch-xla")


@dataclass(frozen=True)
class CompileOptions:
    """Options of one compile; `None`, and dtype "auto", leave the choice to the target, which says what and why.

    `sample_top_k` (0 … MAX_TOP_K): how many of the largest logits, with their ids, graphs return beside all of them.
    `tensor_parallel`: devices that one graph is sharded over. `lowering`: who turns the traced program into StableHLO.
    `roll_layers`: whether repeated layers become one scanned body. `cache_slots`: sequences that a cache of fixed size
    holds, those kept for their prefixes included. These four are for targets that compile with XLA.
    `kv_cache_dtype`: precision of the KV cache. `group_size`: inputs of a row of quantised weights that share a scale,
    0 for the whole row. `activation_group_size`: inputs of a matrix product that share a scale when activations are
    quantised as it runs, 0 for none quantised. `specialise_memory`: bytes that executables of fixed sizes may hold in
    memory beside the one for every shape. `starter`: graphs of another runtime in the same bundle, which open at once
    and serve until the others are open. These five are for OpenVINO. `max_memory` (bytes) and `max_start` (seconds
    from exec to the first token) limit what engine the device cpu stands for. `kernels`: whose products of quantised
    matrices run on ONNX Runtime.
    Raises UnknownNameError, listing the known names, for an unknown name of any of them or of a verification mode,
    and InputError for a number out of range.
    """

    device: str = "cpu"
    quantize: str | None = None
    dtype: str = "auto"
    specialise: bool | None = None
    verify: str = "sample"
    require_native: bool = False
    jobs: int = 1
    sample_top_k: int = 0
    tensor_parallel: int = 1
    lowering: str = "jax"
    roll_layers: bool | None = None
    cache_slots: int | None = None
    kv_cache_dtype: str | None = None
    group_size: int | None = None
    activation_group_size: int | None = None
    specialise_memory: int | None = None
    starter: bool = False
    max_memory: int | None = None
    max_start: float | None = None
    kernels: str | None = None

    def __post_init__(self) -> None:
        if self.quantize is not None and self.quantize not in QUANTISATIONS:
            raise UnknownNameError("quantisation", self.quantize, QUANTISATIONS)
        if self.dtype not in DTYPES:
            raise UnknownNameError("dtype", self.dtype, DTYPES)
        if self.verify not in VERIFY:
            raise UnknownNameError("verification mode", self.verify, VERIFY)
        if self.jobs < 1:
            raise InputError(f"jobs {self.jobs} must be at least 1")
        if self.kv_cache_dtype is not None and self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise UnknownNameError("KV cache dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if self.kernels is not None and self.kernels not in KERNELS:
            raise UnknownNameError("kernels", self.kernels, KERNELS)
        for name, value in (
            ("--specialise-memory", self.specialise_memory), ("--group-size", self.group_size),
            ("--activation-group-size", self.activation_group_size),
        ):  # fmt: skip
            if value is not None and value < 0:
                raise InputError(f"{name} {value} must not be negative")
        if self.lowering not in LOWERINGS:
            raise UnknownNameError("lowering", self.lowering, LOWERINGS)
        for name, value in (("--tensor-parallel", self.tensor_parallel), ("--cache-slots", self.cache_slots)):
            if value is not None and value < 1:
                raise InputError(f"{name} {value} must be at least 1")
        if not 0 <= self.sample_top_k <= MAX_TOP_K:
            raise InputError(f"--sample-top-k {self.sample_top_k} must be in 1 … {MAX_TOP_K}, or 0 for all logits only")

    @property
    def extensions(self) -> dict[str, int | str | bool]:
        """Options that executables and manifests name where they are used, and not otherwise."""
        given = {name: getattr(self, name) for name in EXTENSIONS}
        return {name: value for name, value in given.items() if value is not None and value != EXTENSIONS[name]}

    def require_vocabulary(self, model: str, size: int) -> None:
        """Raise InputError when more top logits are asked for than `model` has tokens."""
        if self.sample_top_k > size:
            raise InputError(f"--sample-top-k {self.sample_top_k}: {model} has {size} tokens; ask for at most as many")
