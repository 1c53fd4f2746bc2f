"""ISA variants of llmc's own kernels.

A bundle has a kernel library for one or more variants. A CPU runs the fastest one whose features it has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple


class KernelSet(NamedTuple):
    """An ISA variant: its name, machine, and required CPU features, named as in /proc/cpuinfo."""

    name: str
    machine: str
    features: tuple[str, ...]

    def runs_on(self, features: Collection[str]) -> bool:
        """Whether a host with `features` (from `host.cpu_features`, machine included) can run this variant."""
        return {self.machine, *self.features} <= set(features)

    @property
    def has_bf16_tiles(self) -> bool:
        """Whether the variant has bfloat16 tile instructions."""
        return "amx_bf16" in self.features

    @property
    def fast_bf16_attention(self) -> bool:
        """Whether attention over bfloat16 keys and values was measured to be no slower than over float16."""
        return "avx512_bf16" in self.features

    @property
    def own_bf16_sums(self) -> bool:
        """Whether bfloat16 dot products have the bits of a CPU instruction that sums two or four products.

        Those of all other variants have the bits of tile instructions.
        """
        return bool({"avx512_bf16", "bf16"} & {*self.features}) and not self.has_bf16_tiles

    @property
    def file(self) -> str:
        """The variant's file name in a bundle."""
        return f"{KERNELS}-{self.name}"

    @property
    def isa(self) -> tuple[str, ...]:
        """The machine and features, as a manifest's `isa` lists them."""
        return (self.machine, *self.features)


KERNELS = "kernels"
"""Name prefix of the kernel libraries (compiler/targets/onnxruntime/kernels)."""

_V3 = ("avx2", "f16c", "fma")
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", *_V3)
_DOTPROD = ("asimddp", "asimdhp")
KERNEL_SETS = (
    KernelSet("amx-int8", "x86_64", ("amx_tile", "amx_int8", "amx_bf16", "avx512_bf16", *_AVX512)),
    KernelSet("avx512-bf16", "x86_64", ("avx512_bf16", *_AVX512)),
    KernelSet("avx512-vnni", "x86_64", _AVX512),
    KernelSet("avx-vnni", "x86_64", ("avx_vnni", *_V3)),
    KernelSet("avx2", "x86_64", _V3),
    KernelSet("neon-i8mm", "aarch64", ("i8mm", "bf16", *_DOTPROD)),
    KernelSet("neon-dotprod", "aarch64", _DOTPROD),
)
"""Fastest first for each machine."""


def best_set(features: Collection[str], among: Collection[str] | None = None) -> KernelSet | None:
    """Return the fastest variant named in `among` that a host with these features can run, or None."""
    return next((s for s in KERNEL_SETS if (among is None or s.name in among) and s.runs_on(features)), None)


def common_isa(sets: Iterable[KernelSet]) -> tuple[str, ...]:
    """Return what a CPU needs to run any of these variants, as a manifest lists it; empty for different machines."""
    first, *others = (s.isa for s in sets)
    return tuple(f for f in first if all(f in isa for isa in others))


def sets_in(files: Collection[str]) -> list[KernelSet]:
    """Return the variants whose files are among `files`, the file names of a bundle."""
    return [s for s in KERNEL_SETS if s.file in files]
