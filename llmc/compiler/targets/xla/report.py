"""Formats XLA's analysis of a bundle's executables for people. Bytes are per device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from llmc.compiler.targets.xla.capacity import gib


def lines(analysis: Mapping[str, Any]) -> list[str]:
    """Return lines about memory, work, weight sharding and collectives; none for an empty analysis."""
    found = []
    memory = analysis.get("device_memory")
    if memory:
        parts = [f"{name} {gib(memory[key])}" for name, key in _PARTS]
        share = memory["total"] / memory["available"]
        found.append(
            f"one device of {analysis['topology']}: {', '.join(parts)}: {gib(memory['total'])} of "
            f"{gib(memory['available'])} ({share:.0%})"
        )
    executables = analysis.get("executables", [])
    if executables:
        flops = [e["cost"]["flops"] for e in executables]
        temporary = max(e["memory"]["temporary"] for e in executables)
        found.append(
            f"{len(executables)} executables: matmuls of {min(flops) / 1e9:.3g} to {max(flops) / 1e9:.3g} GFLOP "
            f"a step and device, temporary memory up to {gib(temporary)}"
        )
    split = analysis.get("tensor_parallel")
    if split:
        found.append(
            f"tensor parallel over {split['degree']} devices: weights {gib(split['bytes_per_device'])} a device of "
            f"{gib(split['bytes'])}, cache {split['cache']}; collectives of {len(executables)} steps: "
            f"{_exchanged(executables)}"
        )
        found += split["notes"]
    return found


_PARTS = (("weights", "weights"), ("cache", "cache"), ("largest step", "temporary"), ("code", "code"))


def _exchanged(executables: list[Mapping[str, Any]]) -> str:
    counts: Counter[str] = Counter()
    looped: Counter[str] = Counter()
    for executable in executables:
        for kind, amount in executable["collectives"].items():
            counts[kind] += amount["count"]
            looped[kind] += amount["in_loop"]
    return ", ".join(f"{n} {kind} ({looped[kind]} once a layer)" for kind, n in sorted(counts.items())) or "none"
