"""Common parts of OpenVINO targets: options, lowered models without weights, compiled models over a weights file."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from llmc.compiler.code import code_digest
from llmc.compiler.options import CompileOptions, Option
from llmc.compiler.program.program import GraphProgram, Program, traced_graph
from llmc.compiler.stages import Stages, toolchain, version_of
from llmc.compiler.targets.base import Lowered, Target
from llmc.compiler.targets.description import TRACING, DeviceDescription, Hosting, Requirements
from llmc.compiler.targets.openvino.precision import group_of
from llmc.compiler.weights.stage import weights_stage
from llmc.runtime.host import host_features

if TYPE_CHECKING:
    from llmc.artifacts.digest import Blob
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.workspace import Workspace
    from llmc.compiler.code import Maker
    from llmc.compiler.targets.openvino.finish import FinishedWeights
    from llmc.compiler.targets.openvino.formats import Constants
    from llmc.compiler.verification.limits import VerificationPolicy
    from llmc.runtime.executors.openvino.device import MappedWeights

Finish = Callable[[str, bytes, "MappedWeights", "FinishedWeights"], bytes]
"""Compiles the named model, XML over a weights file, and moves its constants into another weights file."""

DEFAULT_BUDGET = 512 << 20
"""Default bytes for fixed-size executables in addition to the one for every shape (--specialise-memory)."""

KV_CACHE_DTYPE: Option[str | None] = Option(
    "kv_cache_dtype", str, None, "Precision of the KV cache. Default: u8, and f32 where nothing is quantised.",
    metavar="u8|f32|bf16", choices=("u8", "f32", "bf16"), what="KV cache dtype",
)  # fmt: skip
GROUP_SIZE: Option[int | None] = Option(
    "group_size", int, None,
    "Inputs of a row of quantised weights that share a scale: int8 0 (the whole row), 32, 64, 128; int4 32, 64, 128; "
    "keep 32. Default: int8 by the shape of step, the first of the others.",
    metavar="N", least=0,
)  # fmt: skip
ACTIVATION_GROUP_SIZE: Option[int | None] = Option(
    "activation_group_size", int, None,
    "Inputs that share a scale where activations are quantised to 8 bits as they are multiplied (on CPU): 0 (not at "
    "all), 16, 32, 64, 128. Default: int8 by the shape of step, 32 with a given --group-size and for the "
    "others, 0 where nothing is quantised.",
    metavar="N", least=0,
)  # fmt: skip
SPECIALISE_MEMORY: Option[int | None] = Option(
    "specialise_memory", int, None,
    "Memory that graphs of fixed decode batches may take, as in 1G, with --specialise. Default: 512M.",
    metavar="SIZE", least=0, is_size=True, shapes_executable=False,
)  # fmt: skip
STARTER: Option[bool] = Option(
    "starter", bool, False, "Add graphs that open at once, and serve until the others are open.",
    shapes_executable=False,
)  # fmt: skip


OPENVINO = DeviceDescription(
    "openvino",
    "openvino",
    also_called=("intel", "npu"),
    default_quantize="int8",
    options=(KV_CACHE_DTYPE, GROUP_SIZE, ACTIVATION_GROUP_SIZE, SPECIALISE_MEMORY, STARTER),
    requirements=Requirements((*TRACING, "gguf", "openvino"), ("openvino",), ("compile", "openvino"), ("openvino",)),
    guide="docs/cpu.md",
)
"""The common description of both forms."""


def cache_dtype(options: CompileOptions) -> str:
    """Return the KV cache precision: as requested, or that of everything unquantized."""
    return KV_CACHE_DTYPE.of(options) or options.dtype


def budget(options: CompileOptions) -> int:
    """Return the bytes that fixed-size executables may take."""
    requested = SPECIALISE_MEMORY.of(options)
    return DEFAULT_BUDGET if requested is None else requested


class OpenVinoBase(Target):
    """Base of the targets that OpenVINO compiles for."""

    @property
    def verification(self) -> VerificationPolicy:
        from llmc.compiler.verification.limits import VerificationPolicy

        return VerificationPolicy(cache_dtype=cache_dtype)

    def configure(self, options: CompileOptions) -> CompileOptions:
        """Records the weights' group size only where it is not the default."""
        options = super().configure(options)
        requested = GROUP_SIZE.of(options)
        group = group_of(str(options.quantize), requested)
        named = requested is not None and group != self.default_group(str(options.quantize))
        return options.changed(group_size=group if named else None)

    def hosting(self, recorded: Mapping[str, Any]) -> Hosting:
        return Hosting(extra="openvino")

    def default_group(self, quantize: str) -> int | None:
        """Return the default group size; None if there is no single one."""
        return group_of(quantize, None)

    @abstractmethod
    def plugin_settings(self, options: CompileOptions) -> dict[str, Any]:
        """Return OpenVINO's settings for compiling and opening executables, under their manifest names."""

    def toolchain(self) -> dict[str, str]:
        return {"openvino": version_of("openvino", "openvino")}

    def isa(self) -> tuple[str, ...]:
        """Compiled models and verified numbers hold for one instruction set, portable models for any."""
        return host_features() if self.state == "native" else ()

    def lower_stage(
        self, stages: Stages, programs: Sequence[Program], options: CompileOptions, form: Mapping[str, Any],
        code: Maker, lower: Callable[[GraphProgram, Constants], Iterator[tuple[str, Any]]],
    ) -> Entry:  # fmt: skip
        """Return models by name, and "recipes" and "tables" of their constants.

        `form` are the key components for the kind of model, `code` is the calling method; `lower` yields names, each
        with a model over the constants, or a text.
        """
        (program,) = programs
        assert isinstance(program, GraphProgram)
        components = {
            **program.components,
            "quantize": options.quantize,
            "dtype": options.dtype,
            "sample_top_k": options.sample_top_k,
            **({} if (group := GROUP_SIZE.of(options)) is None else {"group_size": group}),
            **form,
            **toolchain("numpy", "openvino", python=True),
            "code": code_digest(code),
        }

        def build(workspace: Workspace) -> Mapping[str, Blob]:
            from llmc.compiler.targets.openvino.formats import Constants, to_xml
            from llmc.compiler.weights.recipes import written

            constants, built = Constants(), dict[str, bytes]()
            for name, model in lower(program, constants):
                built[name] = (model if isinstance(model, str) else to_xml(model, workspace.folder)).encode()
            built |= written(constants.recipes, constants.tables)
            return {name: workspace.put_bytes(data) for name, data in built.items()}

        return stages.run("lower", components, build)

    def finish_stage(
        self, stages: Stages, options: CompileOptions, names: Iterable[str], lowered: Entry, code: Maker,
        finish: Finish,
    ) -> Entry:  # fmt: skip
        """Return the models `names`, each compiled by `finish`, and "weights", the file of their constants.

        `code` is the calling method.
        """
        models = {name: lowered.outputs[name].digest for name in names}
        weights = weights_stage(stages, lowered.outputs["recipes"], lowered.outputs["tables"])
        components = {
            **models,
            "weights": weights.outputs["weights"].digest,
            "placements": weights.outputs["placements"].digest,
            "settings": json.dumps(self.plugin_settings(options), sort_keys=True),
            **toolchain(*self.toolchain()),
            "isa": " ".join(self.isa()),
            "code": code_digest(code),
        }

        def build(workspace: Workspace) -> Mapping[str, Blob]:
            from llmc.compiler.targets.openvino.finish import FinishedWeights
            from llmc.compiler.targets.openvino.formats import set_placements
            from llmc.compiler.weights.recipes import read_placements
            from llmc.runtime.executors.openvino.device import MappedWeights

            placements = read_placements(stages.store.get_bytes(weights.outputs["placements"].digest))
            given = MappedWeights(stages.path(weights.outputs["weights"]))
            built = {}
            with workspace.writer() as out:
                file = FinishedWeights(out)
                for name, digest in models.items():
                    xml = set_placements(stages.store.get_bytes(digest).decode(), placements)
                    built[name] = workspace.put_bytes(finish(name, xml.encode(), given, file))
            assert out.blob is not None
            return {"weights": out.blob, **built}

        return stages.run("finish", components, build)

    def trace(self, stages: Stages, options: CompileOptions) -> Sequence[Program]:
        return [traced_graph(stages)]

    def lowered(
        self, stages: Stages, names: Iterable[str], built: Mapping[str, Blob], weights: Blob, forms: Mapping[str, Blob],
        inputs: Mapping[str, Blob] = MappingProxyType({}),
    ) -> Lowered:  # fmt: skip
        """Combine `names` of `built` with the weights file; `forms` are their XML, `inputs` further compile inputs."""
        models = {name: built[name] for name in names}
        return Lowered(
            files={"weights": weights.digest},
            components={"weights": weights.digest, **{name: blob.digest for name, blob in models.items()}},
            inputs={name: stages.path(blob) for name, blob in {**inputs, **models}.items()},
            forms={name: stages.path(forms[name]) for name in models},
        )
