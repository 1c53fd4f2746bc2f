"""The best of a baseline's settings on this host, searched before anything is measured.

A contender names what may be set (`searched`: option of its engine → values). Each combination opens the engine,
answers once to warm and then ANSWERS times; the least of these times decides, and the measurements of that use are made
with it. Uses: "latency" is a prompt, for decode steps and prefill; "throughput" is several answers at once, for streams
and traces. First tokens and memory are of an engine's defaults.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, Literal

from baselines.results import Trial
from baselines.rounds import ROOM, Rounds, settings
from baselines.scope import Scope
from baselines.worker import Contender, Worker
from llmc.errors import LlmcError

Use = Literal["latency", "throughput"]
USES: Mapping[Use, tuple[str, ...]] = {"latency": ("decode", "prefill"), "throughput": ("streams", "trace")}
"""Use → the kinds of measurement (scope.py) that are made with its setting."""

ANSWERS = 2
TOKENS = 16
"""Tokens of each answer of a throughput's trial."""


def uses(scope: Scope) -> list[Use]:
    """The uses that something of the scope is measured for; none where it does not search."""
    return [use for use, kinds in USES.items() if scope.tune and set(kinds) & set(scope.kinds)]


def combinations(contender: Contender) -> list[dict[str, Any]]:
    """Every setting of a contender that is tried; none of one without anything to search."""
    if not contender.searched:
        return []
    names = list(contender.searched)
    return [dict(zip(names, values, strict=True)) for values in product(*contender.searched.values())]


def tune(rounds: Rounds, scope: Scope, tried: list[Trial]) -> None:
    """Try every contender's settings for every use, each into `tried`; what is opened from then on has the best."""
    for use in uses(scope):
        for contender in rounds.contenders:
            best: Trial | None = None
            for trial in _tried(rounds, scope, contender, use):
                tried.append(trial)
                rounds.on_progress(f"settings for {use}: {contender.name}")
                if trial.seconds is not None and (best is None or trial.seconds < (best.seconds or 0.0)):
                    best = trial
            if best is not None:
                tried[tried.index(best)] = replace(best, chosen=True)
                rounds.tuned[contender.name, use] = best.options


def _tried(rounds: Rounds, scope: Scope, contender: Contender, use: Use) -> Iterator[Trial]:
    for options in combinations(contender):
        try:
            yield Trial(contender.name, use, options, _seconds(rounds, scope, contender, use, options))
        except LlmcError as error:
            yield Trial(contender.name, use, options, error=str(error))


def _seconds(rounds: Rounds, scope: Scope, contender: Contender, use: Use, options: Mapping[str, Any]) -> float:
    rows = 1 if use == "latency" else scope.memory_streams
    length = max(scope.prompts) if use == "latency" else scope.memory_prompt
    sizes = settings(contender, sequences=rows, length=length + TOKENS + ROOM) | dict(options)
    took = []
    with Worker(contender, rounds.threads, rounds.log(contender), **sizes) as worker:
        rounds.warm(worker)
        for turn in range(ANSWERS + 1):
            prompts = [rounds.ids(f"settings {use} {turn} {row}", length) for row in range(rows)]
            if use == "latency":
                answer = worker.ask("prefill", prompt=prompts[0])
            else:
                answer = worker.ask("streams", prompts=prompts, tokens=TOKENS)
            took.append(float(answer["seconds"]))
    return min(took[1:])
