"""What a device is, for people and for the command line: its name, what it offers, what it needs, where it ran, and the
model that its executables are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from llmc.buckets.limits import Limits
    from llmc.buckets.strategies.base import Range
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.options import CompileOptions, Option
    from llmc.compiler.verification.probes import LogitReference
    from llmc.runtime.accelerators import Cards


@dataclass(frozen=True)
class ReferenceModel:
    """A reference for executables: its name in keys and manifests, its place ("module:class", made of a checkpoint),
    the check of what it can read ("module:function" of a checkpoint), the packages that its predictions depend on, and
    what finds the layer where a model that does not match differs ("module:function" of a checkpoint and a number of
    tokens), if there is such."""

    name: str
    location: str
    check: str
    packages: tuple[str, ...] = ()
    layers: str | None = None

    @property
    def module(self) -> str:
        """Where its code is."""
        return self.location.partition(":")[0]

    def open(self, checkpoint: Checkpoint) -> LogitReference:
        """The model with the checkpoint's weights."""
        built: LogitReference = _named(self.location)(checkpoint)
        return built

    def require_readable(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError for an architecture that is not supported, naming those that are, and for a tensor or
        configuration key that nothing would read."""
        _named(self.check)(checkpoint)

    def first_difference(self, checkpoint: Checkpoint, longest: int) -> str:
        """In which layer the model differs, in words, "" where nothing can say it; over texts of `longest` tokens."""
        return str(_named(self.layers)(checkpoint, longest)) if self.layers else ""


def _named(location: str) -> Any:
    module, _, name = location.partition(":")
    return getattr(import_module(module), name)


TRANSFORMERS = ReferenceModel(
    "transformers",
    "llmc.compiler.verification.transformers_reference:TransformersReference",
    "llmc.compiler.frontend.consumed:require_readable",
    ("torch", "transformers"),
    layers="llmc.compiler.verification.layers:first_difference",
)
TOY = ReferenceModel(
    "toy",
    "llmc.compiler.verification.toy_reference:ToyReference",
    "llmc.compiler.verification.toy_reference:require_readable",
)
"""The model of the fake device (fake.py)."""


Ranges: TypeAlias = "Callable[[CompileOptions, Limits], Mapping[str, Range]]"


@dataclass(frozen=True)
class Hardware:
    """A run on the device itself: on which `machine`, with which `toolchain`, when (`date`, "2026-11"), and where its
    figures are (`source`, a document). Without a machine nothing ran on it; `instead` says what was done."""

    machine: str = ""
    toolchain: str = ""
    date: str = ""
    source: str = ""
    instead: str = ""

    @property
    def ran(self) -> bool:
        """Whether executables ran on the device."""
        return bool(self.machine)

    def __str__(self) -> str:
        if self.ran:
            return f"yes: {self.machine}, {self.toolchain}"
        return f"no: {self.instead}" if self.instead else "no"


def contract_tested(instead: str) -> Hardware:
    """Of a device that no machine of the project has: fakes of its toolchain stand for it, and `instead` was done."""
    return Hardware(instead=f"contract-tested, not run on hardware; {instead}")


TRACING = ("torch", "transformers", "safetensors")
"""Modules that tracing a model imports."""


@dataclass(frozen=True)
class Requirements:
    """Modules that compiling and running import, and the extras of llmc that install them."""

    compiling: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    compile_extras: tuple[str, ...] = ("compile",)
    run_extras: tuple[str, ...] = ()


@dataclass(frozen=True)
class Topologies:
    """The topologies that a device takes behind the colon: their form ("GENERATION-SHAPE"), an example
    ("tpu:v5e-2x2"), what rows and the last column of their table are ("generation", "shapes"), and the known ones.

    Each known one has name, generation, shape, chips, devices, hosts and hbm_bytes_per_device.
    """

    written: str
    example: str
    row: str
    column: str
    known: Callable[[], list[dict[str, Any]]]


@dataclass(frozen=True)
class DeviceDescription:
    """Identity and defaults of a device.

    name                the device as --device names it
    executor            the executor that opens its executables
    also_called         other names for the device; an error names the device for each of them
    reference           the model that executables are compared with
    quantisations       offered; `default_quantize` is the default
    dtypes              offered; the first is the default
    options             the device's own options
    why_static          why each bucket needs an executable of its own; "" where any shape can run
    selects_adapters    whether graphs take LoRA adapters that each row chooses (checkpoint/adapter_layout.py)
    config_only         whether executables can be compiled before there are weights
    most_sequences      how many sequences its devices run at once, if they decide; the default of a plan
    ranges              bucket ranges that the options of a compile decide, by name ("prompt_batch" …), for a plan
    needs_processes     compiling holds the interpreter lock, so parallel jobs need processes
    fresh_process       modules that a compiling process imports when it starts. If there are any, each executable is
                        compiled in a process that compiled nothing before: bytes do not depend on earlier compilations
    reads_files         whether compiling reads `Lowered.folder`, so that another host that compiles needs its files
    requirements        packages to install
    topologies          what the device takes behind its name, if it is a topology
    listed              what stands behind its name in the rows of `llmc devices`
    accelerators        which ones its executables are for, as a host shows them
    hardware            where its executables ran
    guide               its page in docs/
    """

    name: str
    executor: str
    also_called: tuple[str, ...] = ()
    reference: ReferenceModel = TRANSFORMERS
    quantisations: tuple[str, ...] = ("none",)
    default_quantize: str = "none"
    dtypes: tuple[str, ...] = ("f32",)
    options: tuple[Option[Any], ...] = ()
    why_static: str = ""
    selects_adapters: bool = False
    config_only: bool = False
    most_sequences: int | None = None
    ranges: Ranges = lambda options, limits: {}
    needs_processes: bool = False
    fresh_process: tuple[str, ...] = ()
    reads_files: bool = True
    requirements: Requirements = Requirements()
    topologies: Topologies | None = None
    listed: tuple[str, ...] = ("",)
    accelerators: tuple[Cards, ...] = ()
    hardware: Hardware = Hardware()
    guide: str = ""
