"""What a compile was asked for."""

from __future__ import annotations

from dataclasses import dataclass

from llmc.errors import InputError, UnknownNameError

QUANTISATIONS = ("none", "int8", "int4", "keep")
DTYPES = ("f32", "bf16", "f16")
VERIFY = ("sample", "all", "none")
MAX_TOP_K = 256


@dataclass(frozen=True)
class CompileOptions:
    """Options of one compile; `None` leaves the choice to the target, which says what it chose and why.

    `sample_top_k` (0 … MAX_TOP_K): how many of the largest logits, with their ids, graphs return beside all of them.
    Raises UnknownNameError, listing the known names, for an unknown quantisation, dtype or verification mode, and
    InputError for less than one job or a `sample_top_k` out of range.
    """

    device: str = "cpu"
    quantize: str | None = None
    dtype: str = "f32"
    specialise: bool | None = None
    verify: str = "sample"
    require_native: bool = False
    jobs: int = 1
    sample_top_k: int = 0

    def __post_init__(self) -> None:
        if self.quantize is not None and self.quantize not in QUANTISATIONS:
            raise UnknownNameError("quantisation", self.quantize, QUANTISATIONS)
        if self.dtype not in DTYPES:
            raise UnknownNameError("dtype", self.dtype, DTYPES)
        if self.verify not in VERIFY:
            raise UnknownNameError("verification mode", self.verify, VERIFY)
        if self.jobs < 1:
            raise InputError(f"jobs {self.jobs} must be at least 1")
        if not 0 <= self.sample_top_k <= MAX_TOP_K:
            raise InputError(f"--sample-top-k {self.sample_top_k} must be in 1 … {MAX_TOP_K}, or 0 for all logits only")

    @property
    def extensions(self) -> dict[str, int]:
        """Options that executables and manifests name where they are used, and not otherwise."""
        return {"sample_top_k": self.sample_top_k} if self.sample_top_k else {}

    def require_vocabulary(self, model: str, size: int) -> None:
        """Raise InputError when more top logits are asked for than `model` has tokens."""
        if self.sample_top_k > size:
            raise InputError(f"--sample-top-k {self.sample_top_k}: {model} has {size} tokens; ask for at most as many")
