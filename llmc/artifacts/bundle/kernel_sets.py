"""The instruction sets that llmc's own kernels are built for: a bundle has a library for one or several of them, and a
CPU runs the fastest that it has the features of."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple


class KernelSet(NamedTuple):
    """One: its name, the machine it is for, and what a CPU needs for it, as /proc/cpuinfo names features."""

    name: str
    machine: str
    features: tuple[str, ...]

    def runs_on(self, features: Collection[str]) -> bool:
        """Whether a host with these features, its machine among them (`host.cpu_features`), runs it."""
        return {self.machine, *self.features} <= set(features)

    @property
    def has_bf16_tiles(self) -> bool:
        """Whether it has tiles for bfloat16."""
        return "amx_bf16" in self.features

    @property
    def fast_bf16_attention(self) -> bool:
        """Whether attention over keys and values in bfloat16 takes no longer with it than over float16, as measured."""
        return "avx512_bf16" in self.features

    @property
    def own_bf16_sums(self) -> bool:
        """Whether its sums of products of bfloat16 have the bits of an instruction for two or four of these; those of
        all other sets have the bits of tiles."""
        return bool({"avx512_bf16", "bf16"} & {*self.features}) and not self.has_bf16_tiles

    @property
    def file(self) -> str:
        """A bundle's file of it."""
        return f"{KERNELS}-{self.name}"

    @property
    def isa(self) -> tuple[str, ...]:
        """What a bundle's manifest says of it: the machine, and the features."""
        return (self.machine, *self.features)


KERNELS = "kernels"
"""What names of these files begin with; shared libraries (compiler/targets/onnxruntime/kernels)."""

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
"""Of each machine the faster ones first."""


def best_set(features: Collection[str], among: Collection[str] | None = None) -> KernelSet | None:
    """The fastest set that a host with these features runs, of those named in `among`; None where there is none."""
    return next((s for s in KERNEL_SETS if (among is None or s.name in among) and s.runs_on(features)), None)


def common_isa(sets: Iterable[KernelSet]) -> tuple[str, ...]:
    """What a CPU needs whichever of these it runs, as a manifest says it; none for several machines."""
    first, *others = (s.isa for s in sets)
    return tuple(f for f in first if all(f in isa for isa in others))


def sets_in(files: Collection[str]) -> list[KernelSet]:
    """Those that a bundle with files of these names has."""
    return [s for s in KERNEL_SETS if s.file in files]
