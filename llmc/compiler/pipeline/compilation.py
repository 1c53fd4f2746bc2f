"""A requested compile: its key, its programs, its dry run, and the bundle, or two for disaggregation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.artifacts.bundle.disaggregated import Halves
from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import Key, canonical_json
from llmc.artifacts.local.opening import open_store
from llmc.artifacts.local.precompiled import path_for, replacing
from llmc.buckets.disaggregated.halves import half
from llmc.buckets.encoding import EncodePlan
from llmc.buckets.plan import Plan
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.code import package_digest
from llmc.compiler.pipeline.compile import CompileResult, Reporter, dry_run, ignore, lowered
from llmc.compiler.pipeline.encoding import (
    GENERATE,
    compile_encoder,
    dry_run_encoder,
    encoder_plan_of,
    programs_of_encoder,
    settled_task,
)
from llmc.compiler.pipeline.journal import Journal
from llmc.compiler.pipeline.on_target import compile_fully, write_host_files
from llmc.compiler.pipeline.planning import plan_for
from llmc.compiler.pipeline.resolve import CompileJob
from llmc.compiler.stages import Stages
from llmc.compiler.targets import declared, open_target
from llmc.compiler.targets.base import Target, VendorPrefill
from llmc.errors import InputError
from llmc.files import read_text
from llmc.platforms import EXTRAS
from llmc.runtime.host import cpu_features

if TYPE_CHECKING:
    from llmc.artifacts.store.store import Store
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.options import CompileOptions
    from llmc.settings import Settings


PHASES = ("program", "lowered")
POSITION = ("jobs", "executor", "address", "worker_memory")
"""Options that set where and how fast something is compiled, and do not change the result."""
BASE = ("numpy", "onnxruntime", "tokenizers")


@dataclass(frozen=True)
class Compilation:
    """A checkpoint, its plan, the options and the store.

    All methods share one opened target and one `job`. A model that embeds or scores has an EncodePlan; each method
    opens its target.
    """

    checkpoint: Checkpoint
    plan: Plan | EncodePlan
    options: CompileOptions
    store: Store
    settings: Settings
    target: Target | None = None
    """The device's target; None until first use."""

    @classmethod
    def of(
        cls, model: str | Path | Checkpoint, options: CompileOptions, store: Store, settings: Settings, *,
        task: str | None = None, plan: Plan | EncodePlan | Path | None = None, **planning: Any,
    ) -> Compilation:  # fmt: skip
        """Open the checkpoint and the target, and plan.

        `task`: "generate", "embed" or "score"; None: the task in the checkpoint's own files. `plan` may be a file.
        Without one, `planning` are arguments of `plan_for`, or of `encoder_plan_of` for a model that embeds or scores.
        Raises the errors of these functions.
        """
        checkpoint = open_checkpoint(model)
        encodes = settled_task(checkpoint, task)
        if encodes is not None:
            if isinstance(plan, Path):
                plan = EncodePlan.from_json(read_text(plan, "plan"), str(plan))
            return cls(checkpoint, encoder_plan_of(checkpoint, encodes, plan, planning), options, store, settings)
        target = open_target(options.device, settings)
        if plan is None:
            requested = {
                "settings": settings,
                "device": options.device,
                "target": target,
                "options": options,
                **planning,
            }
            plan = plan_for(checkpoint, **requested)
        elif isinstance(plan, Path):
            plan = Plan.load(plan)
        elif isinstance(plan, EncodePlan):
            raise InputError(f"the plan is for the task {plan.task}: create one to generate, with llmc plan MODEL")
        return cls(checkpoint, plan, options, store, settings, target)

    @classmethod
    def resumed(cls, output: Path | None, cache_dir: Path | None, settings: Settings) -> tuple[Compilation, Path]:
        """The interrupted compile whose journal is next to the bundle `output`, and that bundle's folder.

        Raises InputError for a missing or unreadable journal, and the errors of `of`.
        """
        journal = Journal.read(output)
        store = open_store(cache_dir, settings, journal.options.device)
        built = cls.of(journal.model, journal.options, store, settings, task=GENERATE, plan=journal.plan)
        return built, journal.output

    @property
    def encodes(self) -> bool:
        """Whether the model embeds or scores, and generates nothing."""
        return isinstance(self.plan, EncodePlan)

    @cached_property
    def job(self) -> CompileJob:
        """The compile job, resolved with the target, for a model that generates. Raises the errors of
        `CompileJob.of`."""
        assert isinstance(self.plan, Plan)
        return CompileJob.of(self.checkpoint, self.plan, self.options, self.settings, self.target)

    @property
    def location(self) -> Path | None:
        """Folder for all bundles of this device, or None (artifacts/local/precompiled.py)."""
        if isinstance(self.plan, EncodePlan):
            return None
        return path_for(self.options.device, self.checkpoint.requested, self.settings.neuron_artifacts)

    @property
    def default_output(self) -> Path:
        """Default bundle folder: its location, or MODEL-DEVICE.llmc in the current directory."""
        device = self.options.device
        named = device.replace(":", "-") if isinstance(self.plan, EncodePlan) else device
        return self.location or Path(f"{stem_of(self.checkpoint.requested)}-{named}.llmc")

    def key(self) -> Key:
        """One key for the whole compile, known before it runs: for the name of a CI cache of the store.

        It covers the checkpoint, buckets, options, all of llmc's code and the packages that it may compile with. On
        hosts with the same processor, compiles with equal keys give the same result; different keys may give it too.
        Hashes the checkpoint, and builds nothing.
        """
        stages, requested = (
            Stages(self.store, self.checkpoint, self.plan, ignore, self.settings),
            self.options.to_dict(),
        )
        packages = {*BASE, *EXTRAS}
        versions = {name: version for name in packages if (version := _version(name)) is not None}
        buckets: list[Any] = [[b.phase, b.batch, b.query, b.context] for b in self.plan.buckets]
        return Key(
            "local-compile",  # no store entry has it, and none may be fetched
            {
                "checkpoint": stages.checkpoint_digest(),
                "buckets": digest_bytes(canonical_json(buckets)),
                **{f"limit.{name}": value for name, value in self.plan.limits.to_dict().items()},
                **{f"option.{name}": repr(value) for name, value in requested.items() if name not in POSITION},
                **{f"toolchain.{name}": version for name, version in versions.items()},
                "isa": " ".join(cpu_features()),
                "code": package_digest(),
            },
        )

    def programs(self, phase: str, report: Reporter) -> Iterator[tuple[str, str]]:
        """Programs of `phase` with their names: traced, or in the form that the device's compiler takes.

        Traced programs have symbolic sizes; a device that lowers bucket by bucket gives one for each shape of the plan.
        A later compile takes the results from the store. Raises the errors of `compile`, and InputError for an unknown
        phase.
        """
        if phase not in PHASES:
            raise InputError(f"--emit {phase!r} is unknown; choose {', '.join(PHASES)} or key")
        if isinstance(self.plan, EncodePlan):
            yield from programs_of_encoder(self.checkpoint, self.plan, self.options, self.store, phase, report)
            return
        job = self.job
        stages = Stages(self.store, job.checkpoint, job.plan, report, job.target.settings)
        if phase == "program":
            for program in job.target.trace(stages, job.options):
                yield program.name, program.text()
            return
        built, options, _ = lowered(stages, job.target, job.requested, job.options)
        yield from job.target.show(built, job.target.shapes(job.plan.buckets, options), options)

    def dry_run(self) -> dict[str, Any]:
        """Describe what a compile would do (`pipeline.dry_run`, `dry_run_encoder`). Builds nothing; raises the errors
        of `compile`."""
        if isinstance(self.plan, EncodePlan):
            return dry_run_encoder(self.checkpoint, self.plan, self.options, self.store)
        return dry_run(self.job, self.store)

    def compile(self, output: Path, report: Reporter, *, resumable: bool = False) -> CompileResult:
        """Compile into the bundle folder `output`, and compile portable executables natively on the device's own host.

        With `resumable` a journal is next to it until the bundle is published (`Compilation.resumed`). Raises
        CheckpointError, CompileError, VerificationError, DeviceError, CapacityError or ArtifactError; then `output`
        stays unchanged.
        """
        if isinstance(self.plan, EncodePlan):
            return compile_encoder(self.checkpoint, output, self.plan, self.options, self.store, report)
        journal = Journal(self.checkpoint.requested, self.plan, self.options, output)
        with (
            replacing(self.location if output == self.location else None),
            journal.running() if resumable else nullcontext(),
        ):
            return compile_fully(self.job, output, self.store, report)

    def with_host_files(self, result: CompileResult) -> CompileResult:
        """Add the host files to the result of `compile` (`write_host_files`)."""
        return result if self.encodes else write_host_files(result, self.job.target)


def stem_of(model: str) -> str:
    """Name that a model's bundles start with: its file or folder; for a config.json its folder."""
    path = Path(model)
    return path.resolve().parent.name if path.name == "config.json" else path.stem


def _version(module: str) -> str | None:
    try:
        return metadata.version(module.replace("_", "-"))
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class DisaggregatedResult:
    """Compile results by role: "prefill" and "decode", or only "decode".

    The latter means that the decode device runs prefill on the other device itself, once `variables` are set where it
    runs.
    """

    folder: Path
    halves: Mapping[str, CompileResult]
    variables: Mapping[str, str]


def compile_disaggregated(requested: Compilation, folder: Path, prefill: str, report: Reporter) -> DisaggregatedResult:
    """Compile a request for its device, which decodes, and for the device `prefill`, into `folder`.

    Each half has all buckets of its phase, and one that only serves the other phase (buckets/disaggregated/halves.py).
    Options that targets declare go to the halves whose device declares them. Raises the errors of
    `Compilation.compile`, and InputError for an option that neither device takes.
    """
    checkpoint, plan, options = requested.checkpoint, requested.plan, requested.options
    assert isinstance(plan, Plan)
    if checkpoint.choices:
        raise InputError(
            f"{checkpoint.name} has selectable adapters, whose prompts cannot be transferred between devices: compile "
            "for one device, or merge an adapter (--lora)"
        )
    target = requested.target or open_target(options.device, requested.settings)
    variables = target.prefills_on(prefill) if isinstance(target, VendorPrefill) else None
    if variables is not None:
        return DisaggregatedResult(folder, {"decode": requested.compile(folder, report)}, variables)
    chosen = {"prefill": _for(prefill, options), "decode": _for(options.device, options)}
    for name in options.own:
        if not any(name in one.own for one in chosen.values()):
            raise InputError(f"{declared()[name].option.flag} is not offered for {prefill} and {options.device}")
    halves = Halves.of(folder)
    built = {}
    for role, location, phase in (("prefill", halves.prefill, "prompt"), ("decode", halves.decode, "decode")):
        part = half(plan, "prompt" if phase == "prompt" else "decode")
        opened = target if role == "decode" else None
        each = Compilation(checkpoint, part, chosen[role], requested.store, requested.settings, opened)
        built[role] = each.compile(location, report)
    halves.write()
    return DisaggregatedResult(folder, built, {})


def _for(device: str, options: CompileOptions) -> CompileOptions:
    known, name = declared(), device.partition(":")[0]
    own = {option: value for option, value in options.own.items() if name in known[option].devices}
    return replace(options, device=device, own=own)
