"""What a compile was asked for."""

from __future__ import annotations

from dataclasses import dataclass

from llmc.errors import InputError, UnknownNameError

QUANTISATIONS = ("none", "int8", "int4", "keep")
DTYPES = ("f32", "bf16", "f16")
VERIFY = ("sample", "all", "none")


@dataclass(frozen=True)
class CompileOptions:
    """Options of one compile; `None` leaves the choice to the target, which says what it chose and why.

    Raises UnknownNameError, listing the known names, for an unknown quantisation, dtype or verification mode, and
    InputError for less than one job.
    """

    device: str = "cpu"
    quantize: str | None = None
    dtype: str = "f32"
    specialise: bool | None = None
    verify: str = "sample"
    require_native: bool = False
    jobs: int = 1

    def __post_init__(self) -> None:
        if self.quantize is not None and self.quantize not in QUANTISATIONS:
            raise UnknownNameError("quantisation", self.quantize, QUANTISATIONS)
        if self.dtype not in DTYPES:
            raise UnknownNameError("dtype", self.dtype, DTYPES)
        if self.verify not in VERIFY:
            raise UnknownNameError("verification mode", self.verify, VERIFY)
        if self.jobs < 1:
            raise InputError(f"jobs {self.jobs} must be at least 1")
