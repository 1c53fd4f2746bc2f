"""How a server finds its bundle, or compiles it, and what it tells meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.cli.output import CompileProgress

if TYPE_CHECKING:
    from llmc.artifacts.store.store import Store
    from llmc.runtime.bundle import Bundle
    from llmc.server.loading import OpenBundle
    from llmc.server.state import Progress
    from llmc.server.swapping import Reopen
    from llmc.settings import Settings


def opener(
    model: str, device: str | None, options: dict[str, Any], store: Store, weights: str | None, hidden: bool
) -> OpenBundle:
    """Finds the bundle, or compiles it and says so on standard error unless that is `hidden`."""

    def open_bundle(tell: Callable[[Progress], None]) -> Path:
        from llmc.api import bundle_of

        told = _told_by(tell)
        with CompileProgress(hidden) as shown:

            def report(event: Any) -> None:
                shown(event)
                told(event)

            return bundle_of(model, device, options, report, store, weights)

    return open_bundle


def require_there(model: str, device: str | None, settings: Settings, store: Store) -> None:
    """Raise what opening would of a bundle or checkpoint that is not there; nothing is compiled."""
    from llmc.api import names_bundle
    from llmc.artifacts.bundle.manifest import read_manifest
    from llmc.artifacts.local.precompiled import place_for
    from llmc.artifacts.local.references import resolve
    from llmc.compiler.checkpoint import read_config

    if names_bundle(model):
        read_manifest(resolve(model, settings, store))
    elif place_for(device or settings.device, model, settings.neuron_artifacts) is None:
        read_config(model)


def reopener(model: str, device: str | None, options: dict[str, Any], store: Store, weights: str | None) -> Reopen:
    """Finds bundles only: a server compiles nothing while it serves."""

    def reopen(named: str | None, tell: Callable[[Progress], None]) -> Path | Bundle:
        from llmc.artifacts.bundle.manifest import read_manifest
        from llmc.artifacts.local.references import resolve
        from llmc.settings import Settings

        folder = resolve(named or model, Settings.from_environment(), store)
        read_manifest(folder)
        return opener(str(folder), device, options, store, weights, hidden=True)(tell)

    return reopen


def _told_by(tell: Callable[[Progress], None]) -> Callable[[Any], None]:
    """A reporter of a compile that tells its stages, with the seconds left of one from the time of its parts so far."""
    from llmc.compiler.pipeline.compile import BeginReport, ExecutableReport, VerifyReport
    from llmc.server.state import Progress

    first: dict[str, tuple[int, float]] = {}

    def part(stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        begun, since = first.setdefault(stage, (done, now))
        left = (now - since) / (done - begun) * (total - done) if done > begun else None
        tell(Progress(stage, done, total, left))

    def report(event: Any) -> None:
        if isinstance(event, BeginReport):
            pass
        elif isinstance(event, ExecutableReport):
            part("compile", event.index, event.total)
        elif isinstance(event, VerifyReport):
            part("verify", event.done, event.total)
        elif event.seconds is None and event.total > 1:
            part(event.name, event.index, event.total)
        elif event.seconds is None:
            tell(Progress(event.name))

    return report
