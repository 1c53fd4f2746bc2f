"""The tutorial target: a toy language model on a simulated device that uses numpy. docs/adding.md walks through it.

The toy model (model_type "toy") has two tensors, E = model.embed_tokens.weight and W = lm_head.weight, both
[vocab_size, hidden_size]. The cache holds one vector per token, and older vectors decay:

    v_j = (1 + j / max_position_embeddings) · E[token_j]            one cached vector a token
    logits after position t = W · Σ_{j ≤ t} DECAY^(t − j) · v_j     [vocab_size]

With `sliding_window` in its config.json only the last so many tokens count, in a ring-buffer cache. LoRA adapters that
requests choose may change both tensors; the device holds both for each, and selects them per row.

A result depends on every earlier token, its order and its position, as a real model's does. Leaks from padding, wrong
token slots and wrong histories change the numbers. Where a real target traces, lowers and calls a vendor's compiler,
this one writes a few lines of JSON, which llmc/runtime/executors/fake/executor.py runs:

    executable = { "format": 1, "phase", "batch", "query", "context",        sizes, null where they are dynamic
                   "decay", "positions": max_position_embeddings,
                   "weights": digest, "tensors": {name: {"offset": bytes, "shape": [rows, columns]}},
                   and, with a number behind "@", those of each adapter,
                   "sample_top_k": only where just the largest logits are returned,
                   "window": sliding_window, only where there is one }
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

from llmc.artifacts.key import canonical_json
from llmc.compiler.code import code_digest
from llmc.compiler.options import CompileOptions
from llmc.compiler.program.program import PROGRAM, Program
from llmc.compiler.stages import Stages
from llmc.compiler.targets.base import CompiledExecutable, Lowered, Shape, State, Target
from llmc.compiler.targets.costs import Costs, Timing, Verifying
from llmc.compiler.targets.description import TOY, DeviceDescription
from llmc.errors import CheckpointError, InputError
from llmc.runtime.executors.fake.device import EMBEDDING, FORMAT, LM_HEAD, PORTABLE, FakeKind, of_adapter

if TYPE_CHECKING:
    from llmc.artifacts.digest import Blob
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.workspace import Workspace
    from llmc.buckets.bucket import Bucket
    from llmc.buckets.limits import Limits
    from llmc.compiler.targets.on_target import OnTargetCompiler
    from llmc.runtime.cache_shape import CacheShape
    from llmc.settings import Settings

DECAY = -0.9
"""Negative, so that greedy text does not repeat one token: a vector that favours a token opposes it one step later."""

Compiling: TypeAlias = "Callable[[Lowered, Shape, dict[str, Any]], dict[str, Any]]"
"""Maps an executable's fields to those that are written; it may raise or wait."""


class FakeCosts(Costs):
    """Zero compile times."""

    verifying: ClassVar[Verifying] = Verifying(Timing(), Timing(), Timing(), Timing())

    def stage_costs(self, options: CompileOptions, buckets: Sequence[Bucket]) -> Mapping[str, Timing]:
        return {"trace": Timing(), "weights": Timing()}


class FakeTarget(Target):
    """`--device fake`; the detail behind the colon selects the kind of steps (executors/fake/device.py)."""

    description = DeviceDescription("fake", "fake", reference=TOY, selects_adapters=True, reads_files=False)

    def __init__(
        self, kind: FakeKind | None = None, *, state: State = "native", compiling: Compiling | None = None
    ) -> None:
        """Tests set the state of executables, and `compiling`, called for each one in the thread that compiles it."""
        self._kind, self._state, self._compiling = kind or FakeKind(), state, compiling

    @classmethod
    def of(cls, detail: str, settings: Settings) -> Self:
        return cls(FakeKind.of(detail), state="portable" if detail == PORTABLE else "native")

    def remaining(self) -> str:
        return "" if self._state == "native" else "a fake device has to be attached"

    def on_target(self) -> OnTargetCompiler | None:
        """The on-target compiler, imported here to keep it out of portable executables' keys."""
        if self._state == "native":
            return None

        from llmc.compiler.targets.fake_on_target import FakeOnTargetCompiler

        return FakeOnTargetCompiler()

    def configure(self, options: CompileOptions) -> CompileOptions:
        """Defaults to one executable a bucket, for tests of buckets; ragged steps have no fixed shape."""
        if self._kind.ragged and options.specialise:
            raise InputError("--specialise: ragged steps have no fixed shape; leave it out, or take --device fake")
        if self._kind.graph_memory is not None and options.specialise is False:
            raise InputError("--no-specialise: graphs have a fixed shape; leave it out, or take --device fake")
        specialise = not self._kind.ragged if options.specialise is None else options.specialise
        return super().configure(replace(options, specialise=specialise))

    @property
    def costs(self) -> Costs:
        return FakeCosts()

    def toolchain(self) -> dict[str, str]:
        from llmc.runtime.executors.fake.executor import FAKE_VERSION

        return {"fake": FAKE_VERSION}

    def held_cache(self, cache: CacheShape, limits: Limits, options: CompileOptions) -> CacheShape:
        """Ring buffers of whole blocks, one more than the window's."""
        return cache.in_blocks(limits.block_size, limits.max_model_len)

    def trace(self, stages: Stages, options: CompileOptions) -> Sequence[Program]:
        """Write the formula's constants as JSON; a real target traces the transformers model (program/program.py)."""
        facts: dict[str, Any] = {"positions": _positions(stages), **_window(stages)}

        def build(workspace: Workspace) -> Mapping[str, Blob]:
            return {PROGRAM: workspace.put_bytes(canonical_json({"decay": DECAY, **facts}))}

        components = {**facts, "code": code_digest(self.trace)}
        return [Program.stored("toy", stages, stages.run("trace", components, build))]

    def lower(self, stages: Stages, programs: Sequence[Program], options: CompileOptions) -> Lowered:
        (program,) = programs
        weights = self._weights(stages)
        file, placements = weights.outputs["weights"], weights.outputs["placements"]
        return Lowered(
            files={"weights": file.digest},
            # Everything `compile` reads besides shape and options. A missing component would let a changed model find
            # an old model's executable. The program holds all positions and code.
            components={
                "weights": file.digest,
                "placements": placements.digest,
                **{name: str(fact) for name, fact in {"positions": _positions(stages), **_window(stages)}.items()},
            },
            inputs={"placements": stages.path(placements), PROGRAM: program.paths[PROGRAM]},
            forms={PROGRAM: program.paths[PROGRAM], "placements": stages.path(placements)},
        )

    def _weights(self, stages: Stages) -> Entry:
        """Both tensors, for each adapter and for none, in one file with their offsets; built once per checkpoint."""
        components = {
            **stages.reading(),
            "code": code_digest(self._weights, type(stages.checkpoint)),
        }

        def build(workspace: Workspace) -> Mapping[str, Blob]:
            placements = {}
            with workspace.writer() as out:
                for number, name in product(range(len(stages.checkpoint.choices) + 1), (EMBEDDING, LM_HEAD)):
                    tensor = stages.checkpoint.of_adapter(number).tensor(name)
                    _require_shape(stages.checkpoint.config, name, tensor.shape)
                    placements[of_adapter(name, number)] = {"offset": out.tell(), "shape": tensor.shape}
                    out.write(tensor.tobytes())
            assert out.blob is not None  # the blob is set once the block has ended without an error
            return {"weights": out.blob, "placements": workspace.put_bytes(canonical_json(placements))}

        return stages.run("weights", components, build)

    def compile(self, lowered: Lowered, shape: Shape, options: CompileOptions) -> CompiledExecutable:
        """Write constants and sizes as JSON, and name the weights by digest, so that all executables share them."""
        sizes = {"phase": shape.phase, "batch": shape.batch, "query": shape.query, "context": shape.context}
        model = {**json.loads(lowered.inputs[PROGRAM].read_bytes()), "weights": lowered.files["weights"]}
        tensors = json.loads(lowered.inputs["placements"].read_bytes())
        program = {"format": FORMAT, **sizes, **model, "tensors": tensors, **options.extensions}
        if self._compiling is not None:
            program = self._compiling(lowered, shape, program)
        return CompiledExecutable(canonical_json(program), self.state)


def _positions(stages: Stages) -> int:
    return int(stages.checkpoint.config["max_position_embeddings"])


def _window(stages: Stages) -> dict[str, int]:
    window = stages.checkpoint.config.get("sliding_window")
    return {} if window is None else {"window": int(window)}


def _require_shape(config: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> None:
    wanted = (config["vocab_size"], config["hidden_size"])
    if shape != wanted:
        raise CheckpointError(
            f"tensor {name} has shape {list(shape)}; vocab_size and hidden_size in config.json say {list(wanted)}"
        )
