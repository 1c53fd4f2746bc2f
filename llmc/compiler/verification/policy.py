"""How a device's executables are verified: which of them, where, and how close to the reference they must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmc.compiler.verification.limits import AccuracyLimits, limits

if TYPE_CHECKING:
    from llmc.buckets.bucket import Bucket
    from llmc.compiler.options import CompileOptions


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
