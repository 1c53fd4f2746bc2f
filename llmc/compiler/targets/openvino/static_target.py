"""Models of one shape for devices without paged attention: NPU and GPU, or the CPU on request.

Executables are native where this host has a compiler for the device, and include the portable model. Else they are
portable: each bucket's model as OpenVINO's IR, over one weights file, verified on this CPU. For the CPU they are
compiled models without weights (finish.py).

    NPU   Intel's NPU compiler, next to OpenVINO's plugins, compiles for a named platform on any host (NPU_PLATFORM with
          NPU_COMPILER_TYPE=PLUGIN); an installed NPU's driver has another compiler, for that NPU only
    GPU   the plugin compiles kernels with the driver of an installed GPU, and there is no other way

OpenVINO 2026.4.1's wheels have the NPU plugin without that compiler (openvino#36374); Intel's archives of OpenVINO have
it (openvino#33129). The plugin looks for the first of LIBRARIES in its own folder (src/plugins/intel_npu,
vcl_api.cpp), which opens the other. Its output for a platform runs with every driver released for it, except for 3720,
whose older drivers refuse it (src/plugins/intel_npu/README.md of 08d1b43): for an NPU 3720, its own driver compiles.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from llmc.artifacts.digest import digest_file
from llmc.compiler.options import CompileOptions
from llmc.compiler.program.program import GraphProgram, Program
from llmc.compiler.stages import Stages
from llmc.compiler.targets.base import CompiledExecutable, Lowered, Recorded, Shape, cache_for
from llmc.compiler.targets.description import Hosting, contract_tested
from llmc.compiler.targets.on_target import EachExecutable
from llmc.compiler.targets.openvino.base_target import (
    ACTIVATION_GROUP_SIZE,
    GROUP_SIZE,
    KV_CACHE_DTYPE,
    OPENVINO,
    OpenVinoBase,
)
from llmc.compiler.weights.stage import weights_stage
from llmc.errors import CompileError, DeviceError, InputError
from llmc.runtime.accelerators import CPU, INTEL_GPU, INTEL_NPU, Accelerator

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Executable
    from llmc.artifacts.store.entries import Entry
    from llmc.buckets.limits import Limits
    from llmc.compiler.targets.costs import Costs
    from llmc.compiler.targets.on_target import OnTargetCompiler
    from llmc.compiler.targets.openvino.finish import FinishedWeights
    from llmc.compiler.targets.openvino.formats import Constants
    from llmc.compiler.verification.limits import VerificationPolicy
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.cache_shape import CacheShape
    from llmc.runtime.executors.openvino.device import MappedWeights
    from llmc.settings import Settings


LIBRARIES = ("openvino_intel_npu_compiler_loader", "openvino_intel_npu_compiler")
OWN_DRIVER_ONLY = "3720"
DEV = Path("/dev")
_NODES = {"NPU": ("accel/accel*",), "GPU": ("dri/renderD*", "dxg")}
_digest = cache(digest_file)


@dataclass(frozen=True)
class DeviceCompiler:
    """How this host compiles for `device`; `built_for`: what the result is tied to (device.py)."""

    device: str
    properties: Mapping[str, str]
    toolchain: Mapping[str, str]
    built_for: Mapping[str, str]

    def compile(self, ir: bytes, weights: MappedWeights) -> bytes:
        """Compile a model of fixed sizes to a DeviceBlob. Raises CompileError with OpenVINO's reason."""
        from llmc.runtime.executors.openvino.blobs import DeviceBlob, reason_of
        from llmc.runtime.executors.openvino.device import kind_of, open_core, version

        try:
            model = open_core().read_model(ir, weights.tensor)
            stream: Any = open_core().compile_model(model, self.device, dict(self.properties)).export_model()
        except RuntimeError as e:
            raise CompileError(f"OpenVINO {version()} cannot compile for {self.device}: {reason_of(e)}") from e
        return DeviceBlob(kind_of(self.device), self.built_for, ir, stream.getvalue()).to_bytes()


def compiler_for(device: str) -> DeviceCompiler | None:
    """Find the compiler for "GPU", "GPU.1", "NPU" (the installed one) or "NPU.4000"; None where this host has none.

    OpenVINO is imported only where /dev has a node of such a device, so that `llmc devices` is quick.
    """
    kind, _, platform = device.partition(".")
    here = _facts_here(device)
    if kind == "GPU":
        return None if here is None else DeviceCompiler(device, {}, _named(here), here)
    wanted = platform or (here or {}).get("platform", "")
    library = npu_compiler()
    if library is not None and wanted not in ("", OWN_DRIVER_ONLY):
        requested = {"NPU_COMPILER_TYPE": "PLUGIN", "NPU_PLATFORM": wanted}
        toolchain = {"npu_platform": wanted, "npu_compiler": _digest(library)}
        return DeviceCompiler("NPU", requested, toolchain, {"platform": wanted})
    if here is not None and here.get("platform", "") == wanted:
        return DeviceCompiler("NPU", {}, _named(here), here)
    return None


def lacking(device: str) -> str:
    """Describe what this host lacks to compile for `device`; "" where it lacks nothing."""
    kind, _, platform = device.partition(".")
    if compiler_for(device) is not None:
        return ""
    if kind == "GPU":
        return f"a {device} that OpenVINO finds, with its OpenCL driver (intel-opencl-icd)"
    if platform == OWN_DRIVER_ONLY:
        return "an NPU 3720 with its driver: it takes what the compiler in its own driver makes"
    if npu_compiler() is None:
        return (
            f"{library_name(LIBRARIES[0])} and {library_name(LIBRARIES[1])} next to OpenVINO's plugins: Intel's "
            "archives of OpenVINO have them, its wheels for Linux do not (openvino#36374)"
        )
    return "the NPU's platform, since no NPU is here: --device openvino:NPU.4000, NPU.5010, NPU.5020 or NPU.6010"


def is_here(device: str) -> bool:
    """Whether OpenVINO finds the device on this host, with the platform that its name states."""
    found = _facts_here(device)
    kind, _, detail = device.partition(".")
    return found is not None and (kind == "GPU" or detail in ("", found.get("platform")))


def npu_compiler() -> Path | None:
    """Find Intel's NPU compiler with its loader in OpenVINO's plugin folder, without importing either."""
    folder = _folder()
    if folder is None:
        return None
    paths = [folder / library_name(name) for name in LIBRARIES]
    return paths[-1] if all(path.is_file() for path in paths) else None


def library_name(name: str) -> str:
    """Return the file name of a shared library on this system."""
    return f"{name}.dll" if sys.platform == "win32" else f"lib{name}.so"


def _folder() -> Path | None:
    found = find_spec("openvino")
    return None if found is None or found.origin is None else Path(found.origin).parent / "libs"


def _facts_here(device: str) -> dict[str, str] | None:
    kind = device.partition(".")[0]
    if not any(True for pattern in _NODES[kind] for _ in DEV.glob(pattern)) or find_spec("openvino") is None:
        return None
    from llmc.runtime.executors.openvino.device import facts_here, has_device

    return facts_here(device) if has_device(device) else None


def _named(facts: Mapping[str, str]) -> dict[str, str]:
    return {f"device_{name.replace(' ', '_')}": value for name, value in facts.items()}


class _BlobCompiler(EachExecutable):
    """Compiles for `device`, "GPU", "GPU.1", "NPU" or "NPU.4000"."""

    reads: ClassVar[tuple[str, ...]] = ("weights",)

    def __init__(self, device: str) -> None:
        self.device = device

    def lacks(self) -> str:
        if is_here(self.device):
            return lacking(self.device)
        return f"OpenVINO finds no {self.device} on this host; install its driver, or compile on a host that has one"

    def compile(self, bundle: Bundle, executable: Executable) -> bytes:
        from llmc.runtime.executors.openvino.device import MappedWeights

        compiler = compiler_for(self.device)
        if compiler is None:
            raise DeviceError(f"{bundle.path}: cannot be compiled here: this host lacks {lacking(self.device)}")
        return compiler.compile(bundle.files.read(executable.blob), MappedWeights(bundle.files.path("weights")))


class GpuBlobCompiler(_BlobCompiler):
    """Compiles for GPUs."""

    executor: ClassVar[str] = "openvino-gpu"


class NpuBlobCompiler(_BlobCompiler):
    """Compiles for NPUs."""

    executor: ClassVar[str] = "openvino-npu"


class _Kind(NamedTuple):
    """Facts of a kind of device; `hosting`: Intel's device plug-ins (intel/intel-device-plugins-for-kubernetes)."""

    accelerator: Accelerator
    compiler: type[_BlobCompiler]
    hosting: Hosting
    remaining: str


_KINDS = {
    "GPU": _Kind(
        INTEL_GPU, GpuBlobCompiler,
        Hosting(extra="openvino", resources={"gpu.intel.com/i915": 1}, devices=("/dev/dri",)),
        "the GPU's host compiles each model, with the plugin and OpenCL driver there",
    ),
    "NPU": _Kind(
        INTEL_NPU, NpuBlobCompiler,
        Hosting(extra="openvino", resources={"npu.intel.com/accel": 1}, devices=("/dev/accel",)),
        "the NPU's host compiles each model, with the compiler in its driver",
    ),
}  # fmt: skip
Sizes = tuple[int, int, int]


class OpenVinoStaticTarget(OpenVinoBase):
    """`--device openvino:DEVICE`: CPU, GPU or NPU, perhaps with a number ("GPU.1") or platform ("NPU.4000")."""

    description = replace(
        OPENVINO,
        executor="openvino-static",
        quantisations=("none", "int8"),
        why_static="models over contiguous caches have one shape each, since NPUs take no other",
        hardware=contract_tested("the models were run and verified on CPU"),
    )

    def __init__(self, device: str = "CPU") -> None:
        self.device = device
        self._kind = _KINDS.get(device.partition(".")[0])
        accelerator = CPU if self._kind is None else self._kind.accelerator
        self.description = replace(OpenVinoStaticTarget.description, accelerators=(accelerator,))

    @property
    def costs(self) -> Costs:
        from llmc.compiler.targets.openvino.costs import OpenVinoCosts

        return OpenVinoCosts(self.default_group)

    @property
    def verification(self) -> VerificationPolicy:
        """Limits of float16 where a GPU or NPU is here to run its own precision."""
        from llmc.runtime.executors.openvino.device import has_device

        def computed_in(options: CompileOptions) -> str:
            return "f16" if self.device != "CPU" and has_device(self.device) else options.dtype

        return replace(super().verification, dtype=computed_in)

    def lacks(self) -> str:
        """The device of native executables, whose portable models this CPU runs."""
        if self.device == "CPU" or self.state == "portable" or is_here(self.device):
            return ""
        return f"no {self.device} here; this CPU runs the portable models inside"

    @classmethod
    def of(cls, detail: str, settings: Settings) -> Self:
        return cls(detail.upper() or "CPU")

    def configure(self, options: CompileOptions) -> CompileOptions:
        """Caches are float32; the plugins convert them to their compute precision."""
        requested, activations = KV_CACHE_DTYPE.of(options), ACTIVATION_GROUP_SIZE.of(options)
        if requested not in (None, "f32"):
            raise InputError(
                f"--kv-cache-dtype {requested} is for paged attention on openvino:CPU; models of one "
                f"shape (openvino:{self.device}) take f32"
            )
        if activations is not None:
            raise InputError(
                f"--activation-group-size {activations} is for paged models on openvino:CPU; models "
                f"of one shape (openvino:{self.device}) leave to the plugin how activations are multiplied"
            )
        return super().configure(options)

    @cached_property
    def compiler(self) -> DeviceCompiler | None:
        """The GPU or NPU compiler of this host; None for the CPU, and where there is none."""
        return None if self.device == "CPU" else compiler_for(self.device)

    def hosting(self, recorded: Mapping[str, Any]) -> Hosting:
        return super().hosting(recorded) if self._kind is None else self._kind.hosting

    def toolchain(self) -> dict[str, str]:
        compiler = self.compiler
        return {**super().toolchain(), **({} if compiler is None else compiler.toolchain)}

    def isa(self) -> tuple[str, ...]:
        """Models for the CPU hold for one instruction set, those for devices for any."""
        return super().isa() if self.device == "CPU" else ()

    def remaining(self) -> str:
        if self._kind is None or self.compiler is not None:
            return ""
        return f"{self._kind.remaining}; here it lacks {lacking(self.device)}"

    def plugin_settings(self, options: CompileOptions) -> dict[str, Any]:
        """On the CPU, float32 throughout is exact; with other weights activations have 8 bits."""
        exact = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"} if options.quantize == "none" else {}
        return {"properties": {"INFERENCE_PRECISION_HINT": "f32", **exact}}

    def recorded(self, options: CompileOptions) -> Recorded:
        found = {**self.plugin_settings(options), "openvino_device": self.device}
        return replace(super().recorded(options), options=found)

    def held_cache(self, cache: CacheShape, limits: Limits, options: CompileOptions) -> CacheShape:
        """Ring buffers of whole blocks of the plan, one more than the window's."""
        return cache.in_blocks(limits.block_size, limits.max_model_len)

    def lower(self, stages: Stages, programs: Sequence[Program], options: CompileOptions) -> Lowered:
        sizes = sorted({shape.sizes for shape in self.shapes(stages.plan.buckets, options)})
        names = [_name(s) for s in sizes]
        entry = self._lower(stages, programs, options, sizes)
        if self.device == "CPU":
            built = self._finish(stages, options, names, entry).outputs
            return self.lowered(stages, names, built, built["weights"], entry.outputs)
        weights = weights_stage(stages, entry.outputs["recipes"], entry.outputs["tables"]).outputs
        placements = {"placements": weights["placements"]}
        return self.lowered(stages, names, entry.outputs, weights["weights"], entry.outputs, placements)

    def compile(self, lowered: Lowered, shape: Shape, options: CompileOptions) -> CompiledExecutable:
        """The model of that shape: compiled, or its IR with its weights' offsets, or both."""
        from llmc.compiler.targets.openvino.formats import set_placements
        from llmc.compiler.weights.recipes import read_placements

        data = lowered.inputs[_name(shape.sizes)].read_bytes()
        if self.device != "CPU":
            placements = read_placements(lowered.inputs["placements"].read_bytes())
            data = set_placements(data.decode(), placements).encode()
        if self.compiler is not None:
            from llmc.artifacts.digest import parse
            from llmc.runtime.executors.openvino.device import MappedWeights

            data = self.compiler.compile(data, MappedWeights(lowered.folder / parse(lowered.files["weights"])))
        return CompiledExecutable(data, self.state)

    def on_target(self) -> OnTargetCompiler | None:
        return None if self._kind is None else self._kind.compiler(self.device)

    def _lower(
        self, stages: Stages, programs: Sequence[Program], options: CompileOptions, sizes: Sequence[Sizes]
    ) -> Entry:
        def lower(program: GraphProgram, constants: Constants) -> Iterator[tuple[str, Any]]:
            from llmc.compiler.program.fuse import fuse
            from llmc.compiler.targets.openvino.formats import format_for
            from llmc.compiler.targets.openvino.static import StaticModel

            graph = fuse(program.graph())
            weights = format_for(str(options.quantize), options.dtype, GROUP_SIZE.of(options))(constants)
            for shape in sizes:
                yield _name(shape), StaticModel(graph, weights, *shape, options.sample_top_k, states, cache).model

        states = not stages.plan.limits.contexts
        cache = cache_for(self, stages, options)
        form = {
            "form": "static", "shapes": " ".join(map(_name, sizes)), **({"states": True} if states else {}),
            **({"rings": json.dumps(cache.rewind.rings)} if cache.rewind.rings else {}),
        }  # fmt: skip
        return self.lower_stage(stages, programs, options, form, self._lower, lower)

    def _finish(self, stages: Stages, options: CompileOptions, names: Sequence[str], lowered: Entry) -> Entry:
        properties = self.plugin_settings(options)["properties"]

        def finish(_: str, xml: bytes, given: MappedWeights, weights: FinishedWeights) -> bytes:
            from llmc.compiler.targets.openvino.finish import weightless
            from llmc.runtime.executors.openvino.device import open_core

            return weightless(open_core().read_model(xml, given.tensor), properties, weights)

        return self.finish_stage(stages, options, names, lowered, self._finish, finish)


def _name(sizes: Sizes) -> str:
    return "model_" + "_".join(map(str, sizes))
