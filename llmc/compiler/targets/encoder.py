"""The target contract for models without a cache, which compile a program of frontend/encode.py, and their registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Self

from llmc.compiler.checkpoint.sentence_files import JUDGES, judges
from llmc.compiler.targets.base import Recorded
from llmc.errors import CheckpointError, InputError, UnknownNameError
from llmc.registry import Registry

if TYPE_CHECKING:
    from llmc.artifacts.key import Value
    from llmc.artifacts.store.entries import Entry
    from llmc.buckets.encoding import EncodePlan
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.stages import Stages
    from llmc.compiler.targets.base import State
    from llmc.compiler.verification.encoding import Reference
    from llmc.runtime.pooling.modules import Task


@dataclass(frozen=True)
class EncoderCase:
    """The task, and the token ids of "no" and "yes" for a decoder that scores by their logits."""

    task: Task
    judges: tuple[int, int] | None = None

    @classmethod
    def of(cls, checkpoint: Checkpoint, task: Task) -> EncoderCase:
        """Create the case of a checkpoint. Raises CheckpointError for a decoder whose tokenizer has no such words."""
        if not judges(checkpoint, task):
            return cls(task)
        from llmc.runtime.text.tokenizer import Tokenizer

        tokenizer = Tokenizer(checkpoint.tokenizer_json())
        no, yes = (tokenizer.token_to_id(word) for word in JUDGES)
        if no is None or yes is None:
            raise CheckpointError(
                f"{checkpoint.path}: a decoder scores by its logits of {' and '.join(JUDGES)}, which its tokenizer has "
                "no tokens for: it is no reranker; give --task generate or embed"
            )
        return cls(task, (no, yes))

    def components(self, stages: Stages) -> dict[str, Value]:
        return {
            **stages.reading(),
            "config": stages.config_digest,
            "task": self.task,
            "judges": None if self.judges is None else " ".join(map(str, self.judges)),
        }


@dataclass(frozen=True)
class CompiledEncoder:
    """Executables by shape, (batch, tokens) or None for any, each a store entry with "executable"; files; facts."""

    executables: Sequence[tuple[tuple[int, int] | None, Entry]]
    files: Mapping[str, str]
    facts: Mapping[str, Any] = field(default_factory=dict)


class EncoderTarget(ABC):
    """One device's compiler for models without a cache."""

    name: ClassVar[str]
    encoder: ClassVar[str]
    """The encoder that runs its executables (runtime/executors/encoders)."""
    quantisations: ClassVar[tuple[str, ...]] = ("none",)
    dtypes: ClassVar[tuple[str, ...]] = ("f32",)
    packages: ClassVar[tuple[str, ...]] = ()
    """Modules that a host needs."""
    reference_name: ClassVar[str] = "transformers"
    reference_packages: ClassVar[tuple[str, ...]] = ("torch", "transformers")
    """The packages of the reference model, for manifests and keys."""

    @classmethod
    def of(cls, detail: str) -> Self:
        """Create the target for `detail`, the text behind the device's name. Raises InputError for an unknown one."""
        if detail:
            raise InputError(f"--device {cls.name}:{detail}: models that embed or score take only --device {cls.name}")
        return cls()

    @classmethod
    def missing(cls) -> str:
        """Return the package that this host lacks to compile; "" if none."""
        return next((package for package in cls.packages if find_spec(package) is None), "")

    def choice(self, options: CompileOptions) -> str:
        """Explain the executables' shapes for the summary."""
        if options.specialise:
            return "one executable per bucket of texts × tokens"
        return "one executable for all buckets: any shape runs, padded only to its longest text"

    def configure(self, options: CompileOptions) -> CompileOptions:
        """Fill in defaults. Raises InputError for options that this target does not offer."""
        dtype = self.default_dtype() if options.dtype == "auto" else options.dtype
        quantize = options.quantize or "none"
        for what, value, known in (("quantize", quantize, self.quantisations), ("dtype", dtype, self.dtypes)):
            if value not in known:
                raise InputError(
                    f"--{what} {value} is not offered for embedding and scoring on device {self.name}; offered: "
                    f"{', '.join(known)}"
                )
        if options.require_native and self.state != "native":
            raise InputError("--require-native: models that embed or score are compiled on each host that opens them")
        if options.sample_top_k:
            raise InputError("--sample-top-k is for models that generate text; leave it out")
        if options.own:
            raise InputError(f"--{next(iter(options.own)).replace('_', '-')} is for models that generate text")
        return replace(options, dtype=dtype, quantize=quantize, specialise=self.specialised(options))

    def specialised(self, options: CompileOptions) -> bool:
        """Whether each bucket gets its own executable. Raises InputError where that was requested in vain."""
        if options.specialise:
            raise InputError(f"--specialise: {self.choice(replace(options, specialise=False))}; leave it out")
        return False

    def default_dtype(self) -> str:
        return "f32"

    @property
    def state(self) -> State:
        """The state of executables that this host compiles: "portable" where each opening host compiles them again."""
        return "portable"

    def analyse(self, stages: Stages, built: CompiledEncoder, options: CompileOptions) -> dict[str, Any]:
        """Return facts about the compiled executables for the manifest and --json. Raises CompileError if they do not
        fit.
        """
        return {}

    def recorded(self, options: CompileOptions) -> Recorded:
        """Return what the manifest records: no instruction set, since devices compile at open."""
        return Recorded(self.encoder)

    def reference(self, checkpoint: Checkpoint, case: EncoderCase) -> Reference:
        """Open the model that results are compared with. Raises CheckpointError."""
        from llmc.compiler.verification.encoding import encoder_reference

        return encoder_reference(checkpoint, case.task, case.judges)

    @abstractmethod
    def toolchain(self) -> dict[str, str]:
        """Return versions of the packages that determine an executable. Raises DeviceError."""

    def traced(self, stages: Stages, case: EncoderCase, options: CompileOptions) -> Iterator[tuple[str, str]]:
        """Yield name and text of the traced program; sizes are symbols. Raises CheckpointError and CompileError."""
        from llmc.compiler.frontend.encode import Encode, trace_encoder
        from llmc.compiler.program.import_fx import import_encoder

        yield "encode", import_encoder(trace_encoder(Encode(stages.checkpoint, case.task, case.judges))).text()

    @abstractmethod
    def lowered(
        self, stages: Stages, plan: EncodePlan, case: EncoderCase, options: CompileOptions
    ) -> Iterator[tuple[str, str]]:  # fmt: skip
        """Yield name and text of each lowered program. Raises the errors of `make`."""

    @abstractmethod
    def make(self, stages: Stages, plan: EncodePlan, case: EncoderCase, options: CompileOptions) -> CompiledEncoder:
        """Trace, lower and compile, as cached stages. Raises CheckpointError and CompileError."""


TARGETS = Registry(
    "device for embedding and scoring",
    "llmc.encoder_targets",
    {
        "fake": "llmc.compiler.targets.fake_encoder:FakeEncoderTarget",
        "onnxruntime": "llmc.compiler.targets.onnxruntime.encoder:OnnxRuntimeEncoderTarget",
        "openvino": "llmc.compiler.targets.openvino.encoder:OpenVinoEncoderTarget",
        "tpu": "llmc.compiler.targets.xla.encoder:TpuEncoderTarget",
        "xla": "llmc.compiler.targets.xla.encoder:XlaEncoderTarget",
    },
    untold=("fake",),
)
CPU, ENGINES = "cpu", ("openvino", "onnxruntime")
"""The engines of `--device cpu`; the first installed one is used."""


def open_encoder_target(device: str) -> tuple[EncoderTarget, str]:
    """Open the target for `device`, and return why it was selected. Raises InputError."""
    name, _, detail = device.partition(":")
    if name != CPU:
        return _named(name, device).of(detail), ""
    targets = [(_named(engine, device), engine) for engine in ENGINES]
    target, engine = next((found for found in targets if not found[0].missing()), targets[0])
    why = "the first installed CPU engine for models without a cache"
    if engine != ENGINES[0]:
        why = f"{targets[0][0].missing()} is not installed here"
    return target.of(detail), f"{engine}: {why}"


def encoder_target(name: str) -> EncoderTarget:
    """Look up a target by its name in manifests. Raises UnknownNameError."""
    built: EncoderTarget = TARGETS.get(name)()
    return built


def _named(name: str, device: str) -> type[EncoderTarget]:
    try:
        found: type[EncoderTarget] = TARGETS.get(name)
    except UnknownNameError:
        offered = ", ".join([CPU, *TARGETS.reported()])
        raise InputError(f"--device {device} cannot embed or score; choose one of {offered}") from None
    return found
