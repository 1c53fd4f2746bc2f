"""One comparison from its contenders to its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from baselines.machine import describe, read_bandwidth
from baselines.measure import Measurer
from baselines.results import Comparison
from baselines.rounds import Progress
from baselines.scope import Scope
from baselines.tuning import tune
from baselines.worker import Contender
from llmc.errors import DeviceError, LlmcError

OF_ROOFLINE = "of the roofline"
"""Name of the share of a decode step's time that reading the weights alone would take."""


def run(
    contenders: Sequence[Contender], scope: Scope, *, model: str, threads: int, vocabulary: int, logs: Path,
    progress: Progress, reference: Contender | None = None, texts: Sequence[Sequence[int]] = (),
    weights: int | None = None,
) -> Comparison:  # fmt: skip
    """Measure what the scope asks for, in the order of KINDS.

    Quality is of `texts` against the float32 `reference`, and left out, with a note, where there is none. `weights`:
    values that a decode step reads, for its share of the roofline. An interrupt (KeyboardInterrupt) ends it early:
    what was measured comes back, and `unfinished` says what was not; with nothing measured it is raised again. Raises
    DeviceError when no bundle of llmc could be measured at all; what others could not do is in the results.
    """
    found = Comparison(model, describe(), threads, list(contenders), weights=weights)
    logs.mkdir(parents=True, exist_ok=True)
    measurer = Measurer(contenders, scope, threads, vocabulary, logs, progress)
    found.series = measurer.series
    try:
        found.bandwidth = read_bandwidth(threads)
        if "quality" in scope.kinds:
            _quality(found, measurer, reference, texts)
        tune(measurer, scope, found.tuning)
        for kinds, measure in (
            (("decode", "prefill"), measurer.steps),
            (("first-token",), measurer.first_tokens),
            (("memory",), measurer.memory),
            (("streams",), measurer.streams),
            (("trace",), measurer.trace),
        ):
            if set(kinds) & set(scope.kinds):
                measure()
    except KeyboardInterrupt:
        if not found.quality and not any(series.rounds for series in found.series):
            raise
        found.unfinished = measurer.unfinished(found.quality)
    found.contenders = [
        replace(c, versions={**c.versions, **measurer.abouts.get(c.name, {}).get("versions", {})}) for c in contenders
    ]
    _add_roofline(found)
    if not found.unfinished:
        _require_ours(found)
    return found


def _quality(
    found: Comparison, measurer: Measurer, reference: Contender | None, texts: Sequence[Sequence[int]]
) -> None:
    if reference is None or not texts:
        found.notes.append("quality was not measured: there is no float32 reference or no text")
        return
    try:
        measurer.quality(reference, texts, found.quality, found.notes)
    except LlmcError as error:
        found.notes.append(f"quality was not measured: {error}")


def _add_roofline(found: Comparison) -> None:
    for series in (s for s in found.series if s.name.startswith("decode step")):
        for contender in found.contenders:
            ideal = found.roofline_s(contender)
            if ideal is not None and contender.name in series.rounds:
                series.share(contender.name, OF_ROOFLINE, [ideal * 1e3 / series.median(contender.name)])


def _require_ours(found: Comparison) -> None:
    ours = [c.name for c in found.contenders if c.kind == "llmc"]
    if found.series and ours and not any(name in s.rounds for s in found.series for name in ours):
        why = next(s.missing[name] for s in found.series for name in ours if name in s.missing)
        raise DeviceError(f"no measurement of {', '.join(ours)} succeeded: {why}")
