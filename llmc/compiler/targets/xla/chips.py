"""TPU generations, as Google Cloud documents them and as libtpu's compiler describes them.

Figures a chip and shapes: Google Cloud TPU documentation, the pages "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e" and
"TPU7x (Ironwood)"; bandwidth and peak are its decimal GB/s and TFLOP/s. Shapes of v4 and tpu7x follow the rule of its
page "TPU types and topologies" (A ≤ B ≤ C, each at most 4 or a multiple of 4); 1x1x1 is one chip alone. The tests ask
libtpu to describe every shape here.

Names, device kinds, devices a chip and usable bytes: libtpu 0.0.42. Usable is the largest program that it compiles,
rounded down to a MiB; its report of a program that is too large names the rest "reserved": 258 MiB of 16 GiB on v5e,
260 of 31.5 on v6e, 263 of 96 on v5p, 1.25 GiB of 32 on v4, 260 MiB of 95 GiB a device on tpu7x.

One device is one chip, except on tpu7x, whose two cores are always two devices with half the memory each. For libtpu, a
v4 chip is two devices, or, with `megacore`, one device with all memory. llmc asks for `megacore`, because Cloud TPU
hosts run with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

GIB = 1 << 30
_MIB = 1 << 20

Shape = tuple[int, ...]
"""Chips along each axis of a slice."""


@dataclass(frozen=True)
class Chip:
    """One generation. Bytes, FLOP/s and bytes/s are of one chip, but for `usable_bytes`, which is of one device."""

    name: str
    """As libtpu and Google Cloud name it."""
    device_kind: str
    devices_per_chip: int
    hbm_bytes: int
    usable_bytes: int
    """What the compiler lets programs take of one device's memory."""
    peak_flops: float
    """In bfloat16."""
    bandwidth: float
    shapes: tuple[Shape, ...]
    """Known slices, smallest first."""
    accelerator_type: str = ""
    """What Google Cloud writes before "-N" for a slice, where it is documented."""
    counts: Literal["chips", "cores"] = "chips"
    """What that N counts; a chip of v4 and v5p has two cores."""
    chip_config: str | None = None
    """libtpu's `chip_config_name`, where it must not be the default."""

    @property
    def axes(self) -> int:
        """Axes of a slice: 2 or 3."""
        return len(self.shapes[0])


_PLANE = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_CUBES = (
    (1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8), (8, 8, 16),
    (8, 16, 16), (16, 16, 16),
)  # fmt: skip

CHIPS: Mapping[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            "v4", "TPU v4", 1, 32 * GIB, 31_484 * _MIB, 275e12, 1200e9, _CUBES,
            accelerator_type="v4", counts="cores", chip_config="megacore",
        ),
        Chip("v5e", "TPU v5 lite", 1, 16 * GIB, 16_125 * _MIB, 197e12, 819e9, _PLANE, accelerator_type="v5litepod"),
        Chip(
            "v5p", "TPU v5", 1, 95 * GIB, 98_040 * _MIB, 459e12, 2765e9, (*_CUBES, (16, 16, 24)),
            accelerator_type="v5p", counts="cores",
        ),
        Chip("v6e", "TPU v6 lite", 1, 32 * GIB, 31_995 * _MIB, 918e12, 1638e9, _PLANE, accelerator_type="v6e"),
        Chip("tpu7x", "TPU7x", 2, 192 * GIB, 97_019 * _MIB, 2307e12, 7380e9, _CUBES),
    )
}  # fmt: skip
"""By name, oldest first."""
