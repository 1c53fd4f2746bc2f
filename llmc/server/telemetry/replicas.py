"""Metrics of several replicas as those of one server, told apart by the label `replica`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Metric

SCRAPE_S = 5.0
"""Seconds that a replica gets to tell its metrics."""


def labelled(families: Sequence[Metric], replica: str) -> Sequence[Metric]:
    """The same families, each sample with the label."""
    for family in families:
        family.samples = [sample._replace(labels={**sample.labels, "replica": replica}) for sample in family.samples]
    return families


def together(told: Iterable[Sequence[Metric]]) -> Sequence[Metric]:
    """A family that several tell of is there once, as the format asks for."""
    found: dict[str, Metric] = {}
    for families in told:
        for family in families:
            if family.name in found:
                found[family.name].samples += family.samples
            else:
                found[family.name] = family
    return list(found.values())
