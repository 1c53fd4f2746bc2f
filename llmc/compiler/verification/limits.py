"""How close to the reference a bundle must be, by its number formats.

Each format of a bundle adds its own error. Small independent errors of logits add up in the divergence: the limits of a
bundle are the sums of its formats' allowances. The reasons are figures over the text of texts.py (475 positions of
SmolLM2-135M: mean KL in nats to float32, and top-1 agreement). A limit is two to eight times such a figure, because
other models and kernels are less exact. For f16 it is forty times, because devices sum in different precisions. The
multiples are a choice; only this model was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmc.errors import UnknownNameError

if TYPE_CHECKING:
    from llmc.buckets.bucket import Bucket
    from llmc.compiler.options import CompileOptions


@dataclass(frozen=True)
class AccuracyLimits:
    """The limits of a bundle: mean KL divergence to the reference in nats, and top-1 agreement.

    `row_kl` bounds every row, and `bucket_kl` the mean of a bucket of many rows (`bucket_limit`). They keep one wrong
    graph from hiding among many right ones, and one wrong row in a large graph. With `greedy_equal`, greedy
    continuations must be the reference's token by token. `quality` names the formats.
    """

    mean_kl: float
    top1: float
    greedy_equal: bool
    bucket_kl: float
    row_kl: float
    quality: str = "exact"

    def bucket_limit(self, rows: int) -> float:
        """Limit for the mean of a bucket of that many rows: a row's limit for one row, closer to `bucket_kl` for
        more."""
        return self.bucket_kl + (self.row_kl - self.bucket_kl) / rows


@dataclass(frozen=True)
class Allowance:
    """The error that one format may add: mean KL in nats, share of tokens whose argmax may differ, and the reason."""

    mean_kl: float
    differing: float
    reason: str


BUCKET, ROW = 5, 15
"""Multiples of the mean's limit that a bucket of many rows, and a single row, may reach.

Over 128 buckets of SmolLM2-135M on ONNX Runtime the largest mean of a bucket was 0.8 times the limit for int8 and 0.6
for keep, and the largest row 1.2 and 0.6 times. Of single positions of the text, harder ones among them, the largest
was 8.7 and 8.4 times.
"""

EXACT = AccuracyLimits(1e-5, 1.0, True, 1e-5, 1e-5)
WEIGHTS: Mapping[str, Allowance | None] = {
    "none": None,
    "int8": Allowance(
        0.02,
        0.15,
        "8-bit input, blocks of 64: 0.0071, 96.6%; per channel: 0.0053, 96.6%, with u8 KV cache: 0.0091, 97.3%",
    ),
    "fp8": Allowance(0.15, 0.25, "float8 e4m3, a scale for each row, also for lm_head and embedding: 0.053, 84.0%"),
    "keep": Allowance(0.01, 0.10, "the checkpoint's own blocks are exact; 8-bit input: 0.0046, 97.9%"),
    "int4": Allowance(0.15, 0.25, "blocks of 32 with a minimum: 0.059, 86.7%; symmetric ones (0.62, 53%) do not pass"),
}
NUMBERS: Mapping[str, Allowance | None] = {
    "f32": None,
    "f16": Allowance(0.001, 0.02, "0.000024, 99.8%"),
    "bf16": Allowance(0.01, 0.08, "0.0015, 96.6%"),
}
KV_CACHE: Mapping[str, Allowance | None] = {
    **NUMBERS,
    "fp8": Allowance(0.03, 0.15, "float8 e4m3, scale 1: 0.0070, 94.9%"),
    "int8": Allowance(0.005, 0.04, "a scale for each token and head: 0.00094, 98.9%"),
    "u8": Allowance(0.005, 0.04, "a scale and a minimum for each token and head: 0.00068, 98.9%"),
}


def limits(quantize: str, dtype: str, kv_cache: str = "f32", most: float | None = None) -> AccuracyLimits:
    """Limits for weights, unquantised numbers and cached keys and values in these formats; float32 must be equal.

    `most`: the requested mean divergence, in place of the allowances of inexact formats. A cache in `dtype` adds
    nothing of its own. Raises UnknownNameError, listing the known ones, for another format.
    """
    found = {
        quantize: _known("quantisation", quantize, WEIGHTS),
        dtype: _known("dtype", dtype, NUMBERS),
        f"{kv_cache} KV cache": None if kv_cache == dtype else _known("KV cache format", kv_cache, KV_CACHE),
    }
    used = {name: allowance for name, allowance in found.items() if allowance is not None}
    if not used:
        return EXACT
    mean = round(sum(a.mean_kl for a in used.values()), 6) if most is None else most
    return AccuracyLimits(
        mean_kl=mean,
        top1=round(1 - sum(a.differing for a in used.values()), 6),
        greedy_equal=False,
        bucket_kl=round(BUCKET * mean, 6),
        row_kl=round(ROW * mean, 6),
        quality=" + ".join(used) + (", by --max-kl" if most is not None else ""),
    )


def _known(kind: str, name: str, allowances: Mapping[str, Allowance | None]) -> Allowance | None:
    if name not in allowances:
        raise UnknownNameError(kind, name, tuple(allowances))
    return allowances[name]


def _dtype(options: CompileOptions) -> str:
    return options.dtype


@dataclass(frozen=True)
class VerificationPolicy:
    """A device's rules for verification.

    `each`: every executable runs, not only those of sampled buckets. `portable`: this host's CPU runs the portable
    halves, even where such a device is here, which may be another model than the one compiled for. `runs_as`: the
    bucket whose executable runs a bucket. `dtype`, `cache_dtype`: the precisions of everything unquantised, and of the
    KV cache, for the limits.
    """

    each: bool = True
    portable: bool = False
    runs_as: Callable[[Bucket], Bucket] = lambda bucket: bucket
    dtype: Callable[[CompileOptions], str] = _dtype
    cache_dtype: Callable[[CompileOptions], str] = _dtype

    def limits(self, options: CompileOptions) -> AccuracyLimits:
        """Limits for executables compiled with configured `options`."""
        most = options.get("max_kl")
        return limits(
            str(options.quantize), self.dtype(options), self.cache_dtype(options), None if most is None else float(most)
        )
