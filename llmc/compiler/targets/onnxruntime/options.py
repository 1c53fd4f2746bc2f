"""This target's own options: kernels, CPUs, and precisions.

With llmc's kernels, --quantize of a GGUF file in blocks defaults to its own blocks (KEPT has the measurements).
`require_heads` and `takes_experts` state which shapes the kernels take (source/attention.c, source/experts.c).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmc.artifacts.bundle.kernel_sets import KERNEL_SETS
from llmc.compiler.architectures.shared.block_form import BlockForm
from llmc.compiler.options import CompileOptions, Option, UnfitError
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.compiler.architectures.shared.size import Weights

LLMC, OWN = "llmc", "onnxruntime"
AUTO, F16, BF16, INT8 = "auto", "f16", "bf16", "int8"
BLOCK = 32
"""Default number of inputs that share a scale in the blocks of a checkpoint."""
NEEDED_CPUS = " or ".join(f"{s.name} ({' '.join(s.features)})" for s in KERNEL_SETS)

KERNELS_OPTION: Option[str | None] = Option(
    "kernels", str, None, "Which kernels run quantized matmuls. Default: llmc's where the CPU runs them.",
    metavar=f"{LLMC}|{OWN}", choices=(LLMC, OWN),
)  # fmt: skip
CPU_OPTION: Option[str | None] = Option(
    "cpu", str, None,
    "CPUs that llmc's kernels are for, with commas: a compiler's names of them (znver4, x86-64-v3, neoverse-n1), a "
    f"kernel variant ({', '.join(s.name for s in KERNEL_SETS)}), native or all. Default: native. They may also stand "
    "behind the device's name: onnxruntime:aarch64-neoverse-v1.",
    metavar="NAME[,…]",
)  # fmt: skip
ACTIVATIONS: Option[int | None] = Option(
    "activation_group_size", int, None,
    "0: activations stay float32 in quantized matmuls, with --kernels onnxruntime. Default: they are "
    "quantised to 8 bits in the groups of the weights.", metavar="0", least=0,
)  # fmt: skip
GROUP_SIZES = (16, 32, 64, 128, 256)
GROUP_SIZE: Option[int | None] = Option(
    "group_size", int, None,
    "Inputs that share a scale, of a row of int8 or int4 weights and of activations in their matmuls: "
    f"{', '.join(map(str, GROUP_SIZES))}, or the next smaller that divides the row. Default: int8 64, and 32 in "
    "matmuls with normalised hidden states; int4 32.", metavar="N", least=0,
)  # fmt: skip
KV_CACHE_DTYPE: Option[str] = Option(
    "kv_cache_dtype", str, AUTO,
    "Precision of the KV cache, for llmc's kernels: f16; bf16, in which attention is computed then; int8, with a scale "
    "for each token and head. Default: bf16 for CPUs that multiply it (AMX, AVX-512 BF16), else f16; f32 for other "
    "kernels.",
    metavar=f"{AUTO}|{F16}|{BF16}|{INT8}", choices=(AUTO, F16, BF16, INT8), what="KV cache dtype",
)  # fmt: skip
PROMPT_DTYPE: Option[str] = Option(
    "prompt_dtype", str, AUTO,
    "Precision of prefill matmuls in llmc's kernels: int8, in which activations are "
    "quantised as they are in decode; bf16, to which they and the weights are rounded. Default: bf16 for CPUs with "
    "tiles of it (AMX), else int8.",
    metavar=f"{AUTO}|{INT8}|{BF16}", choices=(AUTO, INT8, BF16), what="prompt dtype",
)  # fmt: skip


def ours(options: CompileOptions) -> bool:
    """Whether llmc's kernels run."""
    return KERNELS_OPTION.of(options) == LLMC


def kept_in(options: CompileOptions) -> str | None:
    """Return the KV cache precision of llmc's kernels; None for other kernels."""
    cache = KV_CACHE_DTYPE.of(options)
    return (F16 if cache == AUTO else cache) if ours(options) else None


def prompts_in(options: CompileOptions) -> str:
    """Return the precision of prefill matmuls; int8 also stands for the default of other kernels."""
    return BF16 if PROMPT_DTYPE.of(options) == BF16 else INT8


def keeps(quantize: str, form: BlockForm, embed_lm_head: bool) -> bool:
    """Whether a matrix keeps the checkpoint's blocks; int4 keeps 4-bit blocks, and the embedding's and lm_head's."""
    return quantize == "keep" or (quantize == "int4" and (form.bits == 4 or embed_lm_head))


def with_dtypes(options: CompileOptions, cache: str, prompts: str) -> CompileOptions:
    """Return `options` with the precisions of llmc's kernels; `cache` and `prompts` are the defaults.

    A value that equals the behaviour without the option stays out of manifests and keys. Raises InputError for
    precisions of llmc's kernels where others run.
    """
    found = {}
    for option, default, plain in ((KV_CACHE_DTYPE, cache, F16), (PROMPT_DTYPE, prompts, INT8)):
        requested = option.of(options)
        if requested != AUTO and not ours(options):
            raise InputError(
                f"{option.flag} {requested} is for llmc's kernels: quantise, without --specialise and --kernels "
                "onnxruntime, on a CPU that they run on (docs/cpu.md), or leave it out"
            )
        chosen = default if requested == AUTO else requested
        found[option.name] = None if chosen == plain else chosen
    return options.changed(**found)


def check_activations(options: CompileOptions) -> None:
    """Raise InputError for activations that these kernels do not support."""
    activations = ACTIVATIONS.of(options)
    if activations is None:
        return
    if activations:
        raise InputError(
            f"{ACTIVATIONS.flag} {activations}: ONNX Runtime quantises activations in the groups of the weights, "
            "or with 0 not at all"
        )
    if options.quantize == "none":
        raise InputError(f"{ACTIVATIONS.flag} is for quantised matrices; --quantize none leaves none")
    if ours(options):
        raise InputError(f"{ACTIVATIONS.flag} 0: llmc's kernels multiply whole numbers; add --kernels onnxruntime")


def check_group_size(options: CompileOptions) -> None:
    """Raise InputError for group sizes that weights cannot have."""
    requested = GROUP_SIZE.of(options)
    if requested is None:
        return
    if requested not in GROUP_SIZES:
        raise InputError(f"{GROUP_SIZE.flag} {requested} must be one of {', '.join(map(str, GROUP_SIZES))}")
    if options.quantize not in ("int8", "int4"):
        raise InputError(f"{GROUP_SIZE.flag} is for --quantize int8 and int4, not for {options.quantize}; leave it out")


KEPT = (
    "quantize keep: a GGUF's own blocks decode in 0.67 of int8's time and are nearer to the model (mean KL 0.0044, not "
    "0.0065; SmolLM2 in Q4_1)"
)
"""The reason for summaries and manifests."""

LOOSE = 0.01
"""The largest share of norms, biases and routers in a model's weights."""


def in_gguf_blocks(weights: Sequence[Weights]) -> bool:
    """Whether a GGUF file holds all matrices of the model in blocks that are kept."""
    from llmc.compiler.checkpoint.gguf_file import BLOCK_TYPES

    held = sum(one.count for one in weights if one.stored is not None and one.stored.type in BLOCK_TYPES)
    return held > (1 - LOOSE) * sum(one.count for one in weights)


_LANES, _MOST_DIM = 16, 512
KEYS = 64
"""Ring-buffer slots are a multiple of this, so that they contain whole key blocks (source/attention_blocks.h)."""


def takes_experts(features: int) -> bool:
    """Whether the kernel takes experts of so many features (source/experts.c)."""
    return features % _LANES == 0


def require_heads(attrs: Mapping[str, Any]) -> None:
    """Raise UnfitError for a gqa node (program/fuse.py) that the kernel does not take."""
    widest = max(int(attrs["head_dim"]), int(attrs.get("value_dim", 0)))
    if widest > _MOST_DIM:
        raise unfit_for_kernels(
            f"attention of heads {widest} wide: llmc's kernels take heads of at most {_MOST_DIM} values"
        )


def unfit_for_kernels(why: str) -> UnfitError:
    """Create the error that explains why llmc's kernels cannot run, and ONNX Runtime's must."""
    advice = "use --kernels onnxruntime, without --kv-cache-dtype and --prompt-dtype"
    return UnfitError(why, advice, kernels="onnxruntime", kv_cache_dtype=None, prompt_dtype=None)
