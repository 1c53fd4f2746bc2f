"""A toy model on disk, plans for it, and compiles of it: the whole pipeline in milliseconds, with numpy alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from llmc.artifacts.store.store import Store
from llmc.buckets.plan import Plan
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import CompileResult, Event, ExecutableReport, compile_bundle
from llmc.compiler.stages import StageReport
from llmc.compiler.verification.toy_reference import ToyReference
from llmc.testing.toy import toy_plan, write_toy


def reference(model: Path) -> ToyReference:
    """The trusted implementation of a toy checkpoint."""
    return ToyReference(open_checkpoint(model))


@dataclass
class Toy:
    """A toy checkpoint beside a store; `compile` makes bundles of it and keeps what was reported."""

    model: Path
    store: Store
    bundle: Path
    plan: Plan = field(default_factory=toy_plan)
    events: list[Event] = field(default_factory=list)
    verifies: ClassVar[bool] = False
    """Whether a compile verifies where a test does not say: in tests of compiling it does (tests/compiler/conftest.py).
    Verification takes half of a compile's time."""

    @classmethod
    def make(cls, folder: Path, **model: Any) -> Toy:
        """All in `folder`."""
        return cls(write_toy(folder / "toy", **model), Store(folder / "store"), folder / "bundle")

    def compile(
        self, plan: Plan | None = None, *, report: Callable[[Event], None] | None = None, bundle: Path | None = None,
        store: Store | None = None, model: Path | None = None, **options: Any,
    ) -> CompileResult:  # fmt: skip
        """Compile for the fake device into `bundle`."""
        self.events.clear()

        def keep(event: Event) -> None:
            self.events.append(event)
            if report:
                report(event)

        usual: dict[str, Any] = {"device": "fake"} if self.verifies else {"device": "fake", "verify": "none"}
        requested = CompileOptions.of(**{**usual, **options})
        return compile_bundle(
            str(model or self.model), bundle or self.bundle, plan or self.plan, requested, store or self.store, keep
        )

    @property
    def executables(self) -> list[ExecutableReport]:
        """What the last compile said about executables."""
        return [e for e in self.events if isinstance(e, ExecutableReport)]

    @property
    def built_stages(self) -> set[str]:
        """Stages that the last compile did not find in the store."""
        ended = [e for e in self.events if isinstance(e, StageReport) and e.seconds is not None]
        return {e.name for e in ended if not e.cached}


def greedy(model: Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """The reference's greedy continuations, which no end token stops."""
    trusted = reference(model)
    return [trusted.greedy(prompt, count) for prompt in prompts]
