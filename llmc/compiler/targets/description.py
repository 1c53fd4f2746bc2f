"""Static facts of a device: names, options, requirements, tested hardware, reference model, and what a server needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from llmc.buckets.limits import Limits
    from llmc.buckets.strategies.base import Range
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.options import CompileOptions, Option
    from llmc.compiler.verification.probes import LogitReference
    from llmc.runtime.accelerators import AcceleratorKind


@dataclass(frozen=True)
class ReferenceModel:
    """The model that executables are compared with.

    name              in keys and manifests
    location          "module:class", constructed with a checkpoint
    check             "module:function" of a checkpoint: whether the model can read it
    packages          packages that its predictions depend on
    layers            optional "module:function" of a checkpoint and a token count: finds the first layer that differs
    """

    name: str
    location: str
    check: str
    packages: tuple[str, ...] = ()
    layers: str | None = None

    @property
    def module(self) -> str:
        return self.location.partition(":")[0]

    def open(self, checkpoint: Checkpoint) -> LogitReference:
        built: LogitReference = _named(self.location)(checkpoint)
        return built

    def require_readable(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError for an unsupported architecture, and for an unread tensor or configuration key."""
        _named(self.check)(checkpoint)

    def first_difference(self, checkpoint: Checkpoint, longest: int) -> str:
        """Describe the first layer that differs over texts of `longest` tokens; "" if unknown."""
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


BucketRanges: TypeAlias = "Callable[[CompileOptions, Limits], Mapping[str, Range]]"


@dataclass(frozen=True)
class Hardware:
    """A run on real hardware; `source` is the document with its figures. Without a machine, `instead` says what was
    done.
    """

    machine: str = ""
    toolchain: str = ""
    date: str = ""
    source: str = ""
    instead: str = ""

    @property
    def ran(self) -> bool:
        return bool(self.machine)

    def __str__(self) -> str:
        if self.ran:
            return f"yes: {self.machine}, {self.toolchain}"
        return f"no: {self.instead}" if self.instead else "no"


def contract_tested(instead: str) -> Hardware:
    """Describe a device that the project has no machine for. Fakes of its toolchain replace it; `instead` was done."""
    return Hardware(instead=f"tested against mocks, not run on hardware; {instead}")


TRACING = ("torch", "transformers", "safetensors")
"""Modules that tracing a model imports."""


@dataclass(frozen=True)
class Requirements:
    """Modules that compiling and running import, and the llmc extras that install them."""

    compiling: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    compile_extras: tuple[str, ...] = ("compile",)
    run_extras: tuple[str, ...] = ()


@dataclass(frozen=True)
class Topologies:
    """The topologies behind the colon: form, example, titles of the table's rows and last column, and known ones."""

    written: str
    example: str
    row: str
    column: str
    known: Callable[[], list[dict[str, Any]]]


@dataclass(frozen=True)
class DeviceDescription:
    """Identity and defaults of a device.

    name                its name for --device
    executor            the executor that opens its executables
    also_called         other names, for which an error suggests this one
    reference           the model that executables are compared with
    quantisations       offered; `default_quantize` is the default
    dtypes              offered; the first is the default
    options             the device's own options
    why_static          why each bucket needs an executable of its own; "" where any shape can run
    selects_adapters    whether graphs take per-row LoRA adapters (checkpoint/adapter_layout.py)
    config_only         whether executables can be compiled before there are weights
    most_sequences      how many sequences its devices run at once, if they decide; the default of a plan
    ranges              bucket ranges that the options of a compile decide, by name ("prompt_batch" …), for a plan
    needs_processes     whether compiling holds the interpreter lock, so that parallel jobs need processes
    fresh_process       modules that a compiling process imports when it starts. If there are any, each executable gets
                        a new process, so that its bytes do not depend on earlier compilations
    reads_files         whether compiling reads `Lowered.folder`, so that another host that compiles needs its files
    requirements        packages to install
    topologies          the topologies behind its name, if any
    listed              what follows its name in the rows of `llmc devices`
    accelerators        the accelerators that its executables are for, as a host reports them
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
    ranges: BucketRanges = lambda options, limits: {}
    needs_processes: bool = False
    fresh_process: tuple[str, ...] = ()
    reads_files: bool = True
    requirements: Requirements = Requirements()
    topologies: Topologies | None = None
    listed: tuple[str, ...] = ("",)
    accelerators: tuple[AcceleratorKind, ...] = ()
    hardware: Hardware = Hardware()
    guide: str = ""


@dataclass(frozen=True)
class Hosting:
    """Requirements of one server, for `llmc deploy`: container, pod and unit.

    resources              of the vendor's Kubernetes device plug-in, by name
    node_selector          labels of nodes that have the device
    devices                device nodes
    reservation, runtime   the same in Docker Compose's terms
    environment            set for the server
    extra                  the llmc extra that runs the bundles on a plain Python image
    own_image              the vendor's software that the image must bring where `extra` is not enough
    """

    extra: str = ""
    own_image: str = ""
    resources: Mapping[str, int] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    reservation: Mapping[str, Any] = field(default_factory=dict)
    runtime: str = ""
    host_memory: bool = True
    """Whether weights and cache are in host memory, and host CPUs compute."""


def nvidia(count: int, extra: str, product: str = "") -> Hosting:
    """NVIDIA GPUs. Of `product`, the driver's name, GPU feature discovery makes a label: blanks become dashes."""
    return Hosting(
        extra=extra,
        resources={"nvidia.com/gpu": count},
        node_selector={"nvidia.com/gpu.product": product.replace(" ", "-")} if product else {},
        reservation={"driver": "nvidia", "count": count, "capabilities": ["gpu"]},
        host_memory=False,
    )
