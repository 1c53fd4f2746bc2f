"""The fake device as a test wants it: what `use` says of `--device fake` holds until the patch is undone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import pytest

from llmc.compiler.targets.base import Lowered, Shape
from llmc.compiler.targets.fake import Compiling, FakeTarget
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors.fake import executor as fake
from llmc.runtime.executors.fake.device import FakeKind, FakeProgram
from llmc.runtime.executors.fake.executor import FakeExecutor

Replay: TypeAlias = "Callable[..., tuple[Any, Any]]"
"""Program.replay, or what a broken device computes in its place: of the same program and arguments."""


def use(
    patch: pytest.MonkeyPatch,
    *,
    target: type[FakeTarget] = FakeTarget,
    executor: type[FakeExecutor] | None = None,
    replay: Replay | None = None,
    **built_with: Any,
) -> None:
    """From now on the fake device compiles by `target`, made with these arguments, and runs by `executor` or `replay`.

    What is not named stays as it is. An executor that is open already stays what it was.
    """
    if built_with or target is not FakeTarget:
        patch.setattr(FakeTarget, "of", lambda detail, settings: target(FakeKind.of(detail), **built_with))
    if replay is not None:
        executor = computing(replay)
    if executor is not None:
        patch.setattr(fake, "FakeExecutor", executor)  # whence the registry takes the class


def computing(replay: Replay) -> type[FakeExecutor]:
    """A device of another arithmetic."""

    class Computing(FakeExecutor):
        def replay(self, program: FakeProgram, *given: Any) -> tuple[Any, Any]:
            return replay(program, *given)

    return Computing


def negated(program: FakeProgram, *given: Any) -> tuple[Any, Any]:
    """All that is right, with the other sign."""
    logits, new = program.replay(*given)
    return -logits, -new


def watching(seen: Callable[[Any], object], *methods: str) -> type[FakeExecutor]:
    """A device that tells the step of each call of `methods`, "run" by default, before it takes it."""

    def reported(name: str) -> Any:
        def method(self: FakeExecutor, step: Any) -> Any:
            seen(step)
            return getattr(FakeExecutor, name)(self, step)

        return method

    return type("Watching", (FakeExecutor,), {name: reported(name) for name in methods or ("run",)})


def wrong_for(phase: str, batch: int, query: int, context: int) -> Compiling:
    """A compiler whose executable for one shape is wrong."""

    def compiling(lowered: Lowered, shape: Shape, fields: dict[str, Any]) -> dict[str, Any]:
        wrong = (shape.phase, shape.batch, shape.query, shape.context) == (phase, batch, query, context)
        return {**fields, "decay": -0.8} if wrong else fields

    return compiling


def noting(note: Callable[[str, Any], object]) -> type[FakeExecutor]:
    """A device that may be opened in a thread, and tells "check" with the bundle, "warm" and "close" with itself."""

    class Noting(FakeExecutor):
        description = replace(FakeExecutor.description, opens_in_thread=True)

        @classmethod
        def check(cls, bundle: Bundle) -> None:
            note("check", bundle)
            super().check(bundle)

        def warm(self, steps: list[tuple[str, int, int, int]]) -> None:
            note("warm", self)
            super().warm(steps)

        def close(self) -> None:
            note("close", self)
            super().close()

    return Noting


def slowly(seconds: float) -> Compiling:
    """A compiler that takes its time over each executable."""

    def compiling(lowered: Lowered, shape: Shape, fields: dict[str, Any]) -> dict[str, Any]:
        time.sleep(seconds)
        return fields

    return compiling


def always(**given: Any) -> None:
    """As `use`, for the rest of a process that a test started."""
    use(pytest.MonkeyPatch(), **given)
