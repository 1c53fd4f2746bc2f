"""Described TPUs: `--device tpu:v5e-2x2` compiles for four v5e chips, two along each axis, with libtpu's compiler.

    topology = generation "-" shape      generation as in CHIPS, shape as "2x4" or "2x2x1", in chips
             | accelerator type          Google Cloud's, where it is documented: v5litepod-4, v6e-8 (chips), v4-8, v5p-8
                                         (cores, two a chip)

libtpu writes the hosts of a slice into an executable. Slices of up to eight chips of v5e and v6e, and of up to four of
the others, are described as one host, which runs them in one process (Cloud TPU documentation, the pages of the
generations: v5e and v6e have machines of 1, 4 and 8 chips, the others of 4). Larger slices are described as hosts of
four chips, 2x2.

Figures a chip and shapes: Google Cloud TPU documentation, the pages "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e" and
"TPU7x (Ironwood)"; bandwidth and peak are its decimal GB/s and TFLOP/s. Shapes of v4 and tpu7x follow the rule of its
page "TPU types and topologies" (A ≤ B ≤ C, each at most 4 or a multiple of 4). The tests have libtpu describe every
shape.

Names, device kinds, devices a chip and usable bytes: libtpu 0.0.42. Usable is the largest program that it compiles,
rounded down to a MiB; its report of a program that is too large calls the rest "reserved": 258 MiB of 16 GiB on v5e,
260 of 31.5 on v6e, 263 of 96 on v5p, 1.25 GiB of 32 on v4, 260 MiB of 95 GiB a device on tpu7x.

One device is one chip, except on tpu7x, whose two cores are always two devices with half the memory each. For libtpu, a
v4 chip is two devices, or, with `megacore`, one device with all memory. llmc requests `megacore`, because Cloud TPU
hosts run with it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import permutations
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from llmc.compiler.stages import version_of
from llmc.compiler.targets.description import TRACING, Hosting, Topologies
from llmc.compiler.targets.xla.capacity import DescribedMachine
from llmc.compiler.targets.xla.described import COMPILING, DESCRIBED, DescribedCosts, DescribedTarget, listed
from llmc.errors import DeviceError, InputError
from llmc.platforms import how_to_install, install_line
from llmc.runtime.accelerators import TPU

if TYPE_CHECKING:
    from llmc.compiler.targets.costs import Costs
    from llmc.runtime.executors.xla.client import Platform

GIB = 1 << 30
_MIB = 1 << 20

Shape = tuple[int, ...]
"""Chips along each axis of a slice."""


@dataclass(frozen=True)
class TpuChip:
    """One generation. Bytes, FLOP/s and bytes/s are per chip, except `usable_bytes`, which is per device."""

    name: str
    """The name that libtpu and Google Cloud use."""
    device_kind: str
    devices_per_chip: int
    hbm_bytes: int
    usable_bytes: int
    """Bytes of one device's memory that the compiler lets programs use."""
    peak_flops: float
    """In bfloat16."""
    bandwidth: float
    shapes: tuple[Shape, ...]
    """Known slices, smallest first."""
    accelerator_type: str = ""
    """Google Cloud's prefix of "-N" for a slice, where it is documented."""
    counts: Literal["chips", "cores"] = "chips"
    """The unit of N; a chip of v4 and v5p has two cores."""
    chip_config: str | None = None
    """libtpu's `chip_config_name`, where it must not be the default."""

    @property
    def axes(self) -> int:
        return len(self.shapes[0])


_PLANE = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_CUBES = (
    (1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8), (8, 8, 16),
    (8, 16, 16), (16, 16, 16),
)  # fmt: skip

CHIPS: Mapping[str, TpuChip] = {
    chip.name: chip
    for chip in (
        TpuChip(
            "v4", "TPU v4", 1, 32 * GIB, 31_484 * _MIB, 275e12, 1200e9, _CUBES,
            accelerator_type="v4", counts="cores", chip_config="megacore",
        ),
        TpuChip("v5e", "TPU v5 lite", 1, 16 * GIB, 16_125 * _MIB, 197e12, 819e9, _PLANE, accelerator_type="v5litepod"),
        TpuChip(
            "v5p", "TPU v5", 1, 95 * GIB, 98_040 * _MIB, 459e12, 2765e9, (*_CUBES, (16, 16, 24)),
            accelerator_type="v5p", counts="cores",
        ),
        TpuChip("v6e", "TPU v6 lite", 1, 32 * GIB, 31_995 * _MIB, 918e12, 1638e9, _PLANE, accelerator_type="v6e"),
        TpuChip("tpu7x", "TPU7x", 2, 192 * GIB, 97_019 * _MIB, 2307e12, 7380e9, _CUBES),
    )
}  # fmt: skip
"""By name, oldest first."""


_LANES, _ROWS = 128, 8
_LINE = 1024


def device_bytes(shape: Sequence[int], item_bytes: int) -> int:
    """Return the bytes of an array on a TPU, the padding of its layout included.

    XLA lays two axes out in tiles of 8 × 128, choosing the two that pad least, one axis in lines of 1024, smaller
    arrays in smaller tiles (measured with libtpu 0.0.42; "Tiled layout" in XLA's documentation).
    """
    if len(shape) < 2:
        length, line = math.prod(shape), _LANES * 4 // item_bytes
        while line < min(length, _LINE):
            line *= 2
        return _up(length, line) * item_bytes
    pairs = permutations(range(len(shape)), 2)
    return min(_tiled(shape, *pair, item_bytes) for pair in pairs)


def _tiled(shape: Sequence[int], row: int, column: int, item_bytes: int) -> int:
    tile = max(4 // item_bytes, 1)
    while tile < min(shape[row], _ROWS):
        tile *= 2
    others = math.prod(n for axis, n in enumerate(shape) if axis not in (row, column))
    return others * _up(shape[row], tile) * _up(shape[column], _LANES) * item_bytes


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


EXAMPLE = "tpu:v5e-2x2"
EXTRA = "tpu"
_SLICE = re.compile(r"([a-z0-9]+)-(\d{1,4}(?:x\d{1,4}){1,2})")
_TYPE = re.compile(r"([a-z0-9]+)-(\d{1,6})")
_HOST = {2: (2, 4), 3: (2, 2, 1)}
"""The largest slice that is one host, by axes."""


@dataclass(frozen=True)
class TpuTopology(DescribedMachine):
    """A slice of one generation."""

    larger: ClassVar[str] = "a topology of larger chips"

    chip: TpuChip
    shape: Shape

    @property
    def name(self) -> str:
        return f"{self.chip.name}-{shown(self.shape)}"

    @property
    def libtpu_name(self) -> str:
        return f"{self.chip.name}:{shown(self.shape)}"

    @property
    def generation(self) -> str:
        return self.chip.name

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        return self.chips * self.chip.devices_per_chip

    @property
    def usable_bytes(self) -> int:
        return self.chip.usable_bytes

    @property
    def unit(self) -> str:
        return "chip" if self.chip.devices_per_chip == 1 else "device"

    @property
    def components(self) -> dict[str, str]:
        return {"topology": self.name}

    def array_bytes(self, shape: Sequence[int], item_bytes: int) -> int:
        return device_bytes(shape, item_bytes)

    @property
    def host(self) -> tuple[int, int, int]:
        """Chips of one host along each axis."""
        largest = _HOST[len(self.shape)]
        if all(n <= most for n, most in zip(self.shape, largest, strict=True)):
            x, y, *z = self.shape
            return (x, y, z[0] if z else 1)
        return (2, 2, 1)

    @property
    def hosts(self) -> int:
        """Hosts of the slice; one process can run executables for one host."""
        return self.chips // math.prod(self.host)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `jax.experimental.topologies.get_topology_desc`."""
        config = {} if self.chip.chip_config is None else {"chip_config_name": self.chip.chip_config}
        return {
            "platform": "tpu", "topology_name": self.libtpu_name, "chips_per_host_bounds": list(self.host), **config,
        }  # fmt: skip

    def describe(self) -> list[Any]:
        if missing := [package for package in ("jax", "libtpu") if find_spec(package) is None]:
            how = how_to_install(missing[-1], EXTRA)
            raise DeviceError(f"compiling for a TPU needs {' and '.join(missing)}; {how}")
        import jax
        from jax.experimental import topologies

        try:
            found = list(topologies.get_topology_desc(**self.arguments()).devices)
        except jax.errors.JaxRuntimeError as e:
            raise DeviceError(
                f"libtpu cannot describe topology {self.name}: {str(e).splitlines()[0]:.300}; "
                f"is this the version that llmc supports? {install_line(EXTRA)}"
            ) from e
        if len(found) != self.devices:
            raise DeviceError(
                f"libtpu describes {self.name} as {len(found)} devices, not {self.devices}: {install_line(EXTRA)}"
            )
        return found


def parse_topology(text: str) -> TpuTopology:
    """Parse a topology by the module's grammar. Raises InputError that lists what is known."""
    if not text:
        raise InputError(
            f"--device tpu: name the slice, as tpu:GENERATION-SHAPE, for example {EXAMPLE}; {_generations()}"
        )
    if match := _TYPE.fullmatch(text):
        return _of_type(text, match[1], int(match[2]))
    match = _SLICE.fullmatch(text)
    if match is None:
        raise InputError(
            f"topology {text!r:.80} is not of the form GENERATION-SHAPE, for example {EXAMPLE}; {_generations()}"
        )
    chip = CHIPS.get(match[1])
    if chip is None:
        raise InputError(f"unknown TPU generation {match[1]!r:.40} in topology {text!r:.80}; {_generations()}")
    shape = tuple(int(n) for n in match[2].split("x"))
    if shape not in chip.shapes:
        raise InputError(f"{chip.name} has no slice of shape {match[2]}; {_shapes(chip)}")
    return TpuTopology(chip, shape)


def known() -> list[TpuTopology]:
    """Return every slice, by generation, smallest first."""
    return [TpuTopology(chip, shape) for chip in CHIPS.values() for shape in chip.shapes]


def _of_type(text: str, prefix: str, count: int) -> TpuTopology:
    for chip in CHIPS.values():
        if prefix and prefix == chip.accelerator_type:
            cores = 2 if chip.counts == "cores" else 1
            for shape in chip.shapes:
                if math.prod(shape) * cores == count and (cores == 1 or math.prod(shape) > 1):
                    return TpuTopology(chip, shape)
            raise InputError(f"accelerator type {text} is no slice with a known shape; {_shapes(chip)}")
    if prefix in CHIPS:
        raise InputError(f"topology {text} has no shape; {_shapes(CHIPS[prefix])}")
    raise InputError(f"unknown TPU generation {prefix!r:.40} in topology {text!r:.80}; {_generations()}")


def _generations() -> str:
    return f"known generations: {', '.join(CHIPS)} (llmc devices lists their shapes)"


def _shapes(chip: TpuChip) -> str:
    return f"known for {chip.name}: {', '.join(f'{chip.name}-{shown(shape)}' for shape in chip.shapes)}"


def shown(shape: Shape) -> str:
    """Format a shape: "2x4"."""
    return "x".join(map(str, shape))


GKE = {
    "v4": "tpu-v4-podslice", "v5e": "tpu-v5-lite-podslice", "v5p": "tpu-v5p-slice", "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}  # fmt: skip
"""Google Kubernetes Engine's names of the generations ("About TPUs in GKE", cloud.google.com/gke-tpu-accelerator)."""


def _known() -> list[dict[str, Any]]:
    return [listed(t, t.generation, shown(t.shape), t.chips, t.hosts) for t in known()]


class TpuCosts(DescribedCosts):
    """Cost estimates for TPUs."""

    executable_seconds: ClassVar[float] = 4.0


class TpuTarget(DescribedTarget):
    """`--device tpu:TOPOLOGY`."""

    description = replace(
        DESCRIBED,
        name="tpu",
        fresh_process=(*COMPILING, __name__),
        requirements=replace(
            DESCRIBED.requirements, compiling=(*TRACING, "jax", "libtpu"), compile_extras=("compile", "tpu")
        ),
        topologies=Topologies("GENERATION-SHAPE", "tpu:v5e-2x2", "generation", "shapes", _known),
        guide="docs/xla.md",
        accelerators=(TPU,),
    )
    platform: ClassVar[Platform] = "tpu"
    rolls_by_default: ClassVar[bool] = True

    @property
    def costs(self) -> Costs:
        return TpuCosts(self.topology)

    def lacks(self) -> str:
        from llmc.runtime.executors.xla.client import has_tpu

        return "" if has_tpu() else "needs a TPU host"

    def hosting(self, recorded: Mapping[str, Any]) -> Hosting:
        from llmc.errors import InputError

        slice_ = self.topology
        if slice_.hosts > 1:
            raise InputError(
                f"tpu:{slice_.name} is a slice of {slice_.hosts} hosts, and a server runs on one; compile for a slice "
                "of one host"
            )
        labels = {"accelerator": GKE[slice_.generation], "topology": shown(slice_.shape)}
        return Hosting(
            extra="tpu",
            resources={"google.com/tpu": slice_.chips},
            node_selector={f"cloud.google.com/gke-tpu-{name}": value for name, value in labels.items()},
            host_memory=False,
        )

    @property
    def topology(self) -> TpuTopology:
        return parse_topology(self._detail)

    def toolchain(self) -> dict[str, str]:
        arguments = self.settings.libtpu_arguments
        return {
            **super().toolchain(), "libtpu": version_of("libtpu", "tpu"),
            **({"LIBTPU_INIT_ARGS": arguments} if arguments else {}),
        }  # fmt: skip
