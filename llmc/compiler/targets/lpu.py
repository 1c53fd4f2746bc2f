"""HyperAccel's LPUs: HyperDex's AutoCompiler where it is installed, else portable programs for verification.

HyperDex compiles a model once for a number of LPUs and a max_length. Its artifact serves every prompt and continuation
of at most so many tokens, one sequence at a time: one native executable for all buckets. The arguments are documented
in runtime/executors/lpu/worker.py.

Without HyperDex every bucket has a portable program (programs.py), verified on this CPU in bfloat16, the dtype of LPUs
(Hyper-Accel/vllm, vllm/executor/lpu_executor.py at 026b6ad). That checks the plan and the model's numbers, but nothing
of HyperDex's compiler.

`build` runs HyperDex's compiler over a checkpoint in a folder of its expected form, and stores the files that it
leaves.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import canonical_json
from llmc.compiler.code import code_digest
from llmc.compiler.options import CompileOptions, Option
from llmc.compiler.targets.base import (
    DIMENSIONS,
    CompiledExecutable,
    Deployment,
    Fixed,
    Lowered,
    Recorded,
    Resolved,
    Shape,
)
from llmc.compiler.targets.costs import Costs, Timing
from llmc.compiler.targets.description import Hosting, contract_tested
from llmc.compiler.targets.programs import PROGRAMS, ProgramCosts, ProgramTarget
from llmc.errors import CompileError, DeviceError, InputError
from llmc.runtime.executors.lpu import hyperdex
from llmc.runtime.executors.lpu.hyperdex import MODEL, PACKAGE, Artifact, HyperDex, is_power_of_two

if TYPE_CHECKING:
    from llmc.artifacts.digest import Blob
    from llmc.artifacts.store.workspace import Workspace
    from llmc.buckets.bucket import Bucket
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.program.program import Program
    from llmc.compiler.stages import Stages
    from llmc.settings import Settings

COMPILE_S = 6 * 3600.0
"""After this time the compiler counts as hung; its usual time is not published."""

_CHECKPOINT = "ckpt"


@dataclass(frozen=True)
class LpuLowered(Lowered):
    """HyperDex's files, by their names in the bundle."""

    artifact: Artifact = field(kw_only=True)


def build(stages: Stages, wanted: Artifact, built_by: hyperdex.HyperDexToolchain) -> LpuLowered:
    """Return the checkpoint's artifact, from the store if possible; `wanted` has everything but its files.

    Raises CompileError where HyperDex fails, is killed or hangs, with the path of its log, which is kept.
    """
    arguments = asdict(wanted)
    del arguments["files"], arguments["hyperdex"]
    components = {
        **stages.reading(tokenizer=True),
        **arguments,
        f"toolchain.{PACKAGE}": built_by.version,
        "code": code_digest(build, type(stages.checkpoint)),
    }

    def make(workspace: Workspace) -> Mapping[str, Blob]:
        folder = workspace.folder / MODEL
        _write_checkpoint(stages.checkpoint, folder / _CHECKPOINT)
        before = _files(folder)
        given = {name: value for name, value in arguments.items() if name != "devices"}
        with HyperDex(built_by, CompileError) as process:
            options = {"num_device": wanted.devices, **given}
            process.ask("compile", COMPILE_S, model=str(folder), options=options)
        found = _files(folder)
        if not found.keys() - before.keys():
            raise CompileError("HyperDex's compiler exited without an error, but wrote no file")
        return {path: workspace.put_file(file) for path, file in sorted(found.items())}

    entry = stages.run("hyperdex", components, make)
    names = {path: f"lpu.{number:05d}" for number, path in enumerate(sorted(entry.outputs))}
    artifact = replace(wanted, files=names)
    digests = {path: blob.digest for path, blob in entry.outputs.items()}
    return LpuLowered(
        files={names[path]: digest for path, digest in digests.items()},
        components={"artifact": digest_bytes(canonical_json([asdict(artifact), digests]))},
        inputs={},
        artifact=artifact,
    )


def _write_checkpoint(checkpoint: Checkpoint, folder: Path) -> None:
    """Write a Hugging Face folder as HyperDex downloads them, copied because HyperDex may change it."""
    from llmc.compiler.checkpoint.folder_writer import is_plain_folder, write_folder

    if not is_plain_folder(checkpoint):
        write_folder(checkpoint, folder)
        return
    folder.mkdir(parents=True)
    for role, path in checkpoint.roles().items():
        shutil.copyfile(path, folder / role)


def _files(folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}


LOW_MEMORY_USAGE: Option[bool] = Option(
    "low_memory_usage", bool, False, "Drop the checkpoint's own weights once compiled; GPUs cannot prefill then."
)
FAST_COMPILE: Option[bool] = Option("fast_compile", bool, True, "HyperDex's fast compile.")

U55C_BYTES = 16 << 30
"""Memory of one device, an Alveo U55C (Hyper-Accel/docs, docs/useful_commands.md at 60fc952)."""


class LpuCosts(ProgramCosts):
    """Costs on a number of LPUs; `native`: HyperDex compiles."""

    def __init__(self, devices: int, native: bool) -> None:
        self._devices, self._native = devices, native

    def stage_costs(self, options: CompileOptions, buckets: Sequence[Bucket]) -> Mapping[str, Timing]:
        """HyperDex's compiler is one stage, whose time is unknown before the first run."""
        return {"hyperdex": Timing()} if self._native else super().stage_costs(options, buckets)

    def memory(self, options: CompileOptions) -> tuple[int, str] | None:
        return self._devices * U55C_BYTES, f"of {self._devices} LPUs on Alveo U55C cards"

    def devices(self, options: CompileOptions) -> int:
        return self._devices


class LpuTarget(ProgramTarget):
    """`--device lpu[:N]`: N LPUs share the model."""

    description = replace(
        PROGRAMS,
        name="lpu",
        also_called=("hyperaccel", "hyperdex"),
        dtypes=("bf16",),
        options=(LOW_MEMORY_USAGE, FAST_COMPILE),
        why_static="a portable program has fixed shapes, and HyperDex's artifact its max_length",
        config_only=False,
        most_sequences=1,
        hardware=contract_tested("portable programs were run and verified on CPU"),
        guide="docs/accelerators.md",
    )

    def __init__(self, devices: int = 1) -> None:
        super().__init__()
        self._devices = devices

    @classmethod
    def of(cls, detail: str, settings: Settings) -> Self:
        """N LPUs for "lpu:N", else NUM_LPU_DEVICES, else one; a power of two."""
        named = f"--device lpu:{detail}" if detail else f"NUM_LPU_DEVICES={settings.num_lpu_devices}"
        if detail and not (detail.isascii() and detail.isdecimal() and len(detail) < 6):
            raise InputError(f"{named}: give a number of LPUs after the colon, as in lpu:2")
        devices = int(detail) if detail else settings.num_lpu_devices or 1
        if not is_power_of_two(devices):
            raise InputError(f"{named}: HyperDex compiles for a power of two of LPUs: 1, 2, 4, 8 …")
        return cls(devices)

    @cached_property
    def _hyperdex(self) -> hyperdex.HyperDexToolchain | None:
        try:
            return hyperdex.find_hyperdex(self.settings)
        except DeviceError:
            return None

    @property
    def _native(self) -> bool:
        return self._hyperdex is not None

    def prefills_on(self, device: str) -> Mapping[str, str] | None:
        """NVIDIA GPUs: HyperDex's hybrid mode does the KV transfer (docs/huggingface_api.md, as above)."""
        name, _, count = device.partition(":")
        if name not in ("cuda", "gpu"):
            return None
        if count and not (count.isascii() and count.isdecimal() and int(count)):
            raise InputError(f"--prefill-device {device}: give a number of GPUs after the colon, as in cuda:2")
        return {"NUM_GPU_DEVICES": count or "1", "NUM_LPU_DEVICES": str(self._devices)}

    def configure(self, options: CompileOptions) -> CompileOptions:
        """An artifact has no shapes and returns no logits."""
        if not self._native:
            return super().configure(options)
        if options.specialise:
            raise InputError("--specialise is not offered for device lpu: one artifact serves every bucket")
        if options.sample_top_k:
            raise InputError("--sample-top-k is not offered for device lpu: HyperDex returns tokens, not logits")
        return replace(super().configure(replace(options, specialise=None)), specialise=False)

    def resolve(self, options: CompileOptions, deployment: Deployment) -> Resolved:
        sequences = deployment.limits.max_num_seqs
        if sequences > 1:
            raise InputError(
                f"the plan has {sequences} sequences at once, and LPUs run one at a time (others wait in the queue): "
                "plan with --max-num-seqs 1"
            )
        return super().resolve(options, deployment)

    def recorded(self, options: CompileOptions) -> Recorded:
        executor = "lpu" if self._native else self.description.executor
        return Recorded(executor, options={"devices": self._devices})

    def fixes(self, options: CompileOptions) -> Fixed:
        if self._native:
            why = (
                f"one artifact for every length, {self._devices} LPUs: another max_length would load all weights again"
            )
            return Fixed((), why)
        return Fixed(DIMENSIONS, "one portable program per bucket, one sequence each")

    def remaining(self) -> str:
        if self._native:
            return ""
        return (
            f"on a host with HyperDex, compile the checkpoint again with --device lpu:{self._devices}: AutoCompiler "
            f"builds the artifact there. HyperDex is installed by: {hyperdex.INSTALL}"
        )

    def toolchain(self) -> dict[str, str]:
        return super().toolchain() if self._hyperdex is None else {hyperdex.PACKAGE: self._hyperdex.version}

    def hosting(self, recorded: Mapping[str, Any]) -> Hosting:
        return Hosting(own_image="HyperDex", host_memory=False)

    @property
    def costs(self) -> Costs:
        return LpuCosts(self._devices, self._native)

    def trace(self, stages: Stages, options: CompileOptions) -> Sequence[Program]:
        return () if self._native else super().trace(stages, options)

    def lower(self, stages: Stages, programs: Sequence[Program], options: CompileOptions) -> Lowered:
        if self._hyperdex is None:
            return super().lower(stages, programs, options)
        low, fast = LOW_MEMORY_USAGE.of(options), FAST_COMPILE.of(options)
        wanted = Artifact(
            self._devices, stages.plan.limits.max_model_len, low, fast, self._hyperdex.version, {}
        )  # fmt: skip
        return build(stages, wanted, self._hyperdex)

    def compile(self, lowered: Lowered, shape: Shape, options: CompileOptions) -> CompiledExecutable:
        if isinstance(lowered, LpuLowered):
            return CompiledExecutable(lowered.artifact.to_bytes(), self.state)
        return super().compile(lowered, shape, options)

    def show(self, lowered: Lowered, shapes: Sequence[Shape], options: CompileOptions) -> Iterator[tuple[str, str]]:
        if isinstance(lowered, LpuLowered):
            yield "artifact", lowered.artifact.to_bytes().decode()
        else:
            yield from super().show(lowered, shapes, options)
