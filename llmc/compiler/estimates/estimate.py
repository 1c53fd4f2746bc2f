"""Estimates of a compile and of a server, and warnings for those above an hour, the memory or the disk."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.artifacts.store.store import Store
    from llmc.buckets.bucket import Bucket
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.targets.base import Target
    from llmc.compiler.targets.costs import Costs


@dataclass(frozen=True)
class Estimate:
    """One number, in `unit` ("executables", "s" or "bytes"), and its source."""

    name: str
    value: float
    unit: str
    source: str

    def to_dict(self) -> dict[str, object]:
        """The estimate as a JSON object."""
        return asdict(self)

    @property
    def shown(self) -> str:
        """The value for people."""
        if self.unit == "s":
            return duration(self.value)
        if self.unit == "bytes":
            return f"{self.value / 1e9:.2f} GB" if self.value >= 1e9 else f"{self.value / 1e6:.1f} MB"
        return f"{self.value:g}"


def duration(seconds: float) -> str:
    """Format seconds for people."""
    return f"{seconds / 60:,.1f} min" if seconds >= 120 else f"{seconds:.1f} s"


HOUR = 3600.0
FEWER = "fewer buckets (--max-graphs, or wider steps of --prompt-seq and --decode-seq)"


def beyond(
    estimated: Sequence[Estimate], many: bool, size: int, target: Target, options: CompileOptions, store: Store | None,
    free: int | None = None,
) -> list[str]:  # fmt: skip
    """List a sentence for each estimate above an hour, the memory it has to fit into, or the disk, with flags that
    reduce it.

    `many`: there are several executables. `size`: bundle size in bytes. `free`: free bytes on the disk, by default the
    store's.
    """
    found = []
    estimates = {estimate.name: estimate for estimate in estimated}
    fewer, smaller = ([FEWER] if many else []), _smaller(target, options)
    if (seconds := estimates["compile time"].value) > HOUR:
        flags = [*fewer, *(["--max-compile-time"] if many else []), "--jobs"]
        found.append(_sentence(f"compiling takes about {seconds / 60:,.0f} minutes, above an hour", flags))
    shrinks = {
        "weights": smaller, "KV cache": ["--max-num-seqs", "--max-model-len"], "states": ["--max-num-seqs"],
        "graph memory": [
            *fewer, *(["--max-graph-memory"] if many else []), *smaller, "--max-num-batched-tokens"
        ],
    }  # fmt: skip
    parts = sorted((estimates[name] for name in shrinks if name in estimates), key=lambda part: -part.value)
    total, there = sum(part.value for part in parts), target.costs.memory(options)
    if there is not None and total > there[0]:
        split = ", ".join(f"{part.name} {part.shown}" for part in parts)
        what = f"{total / 1e9:,.1f} GB of memory ({split}) are above the {there[0] / 1e9:,.1f} GB {there[1]}"
        found.append(_sentence(what, [flag for part in parts for flag in shrinks[part.name]]))
    room = _free(store, target.settings) if free is None else free
    if size > room:
        what = f"a bundle of {size / 1e9:,.1f} GB is above the {room / 1e9:,.1f} GB that the store's disk has free"
        found.append(_sentence(what, [*smaller, *fewer, "LLMC_CACHE_DIR on another disk"]))
    return found


def _smaller(target: Target, options: CompileOptions) -> list[str]:
    found = []
    if options.quantize == "none" and len(target.description.quantisations) > 1:
        found.append(f"--quantize {' or '.join(q for q in target.description.quantisations if q != 'none')}")
    if options.quantize == "none" and options.dtype == "f32" and "bf16" in target.description.dtypes:
        found.append("--dtype bf16")
    return [*found, *target.costs.splits_weights]


def _sentence(what: str, flags: Sequence[str]) -> str:
    several = list(dict.fromkeys(flags))
    return f"{what}; reduce it with: {', '.join(several)}" if several else what


def _free(store: Store | None, settings: Settings) -> int:
    """Free bytes on the disk of the store, or where a store would be."""
    folder = Path(store.root if store is not None else settings.cache_dir).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


BASE_BYTES = 1 << 30
"""A server's memory besides weights and cache: process, activations, confined child processes (docs/serving.md)."""
READ_BYTES_S = 100e6
"""Lowest assumed disk read rate of a node, in bytes per second; others use the disk too."""


@dataclass(frozen=True)
class ServerEstimate:
    """Memory and start time of a server for one compiled or estimated bundle.

    `size`, `weight_bytes` and `cache_bytes` are bytes: all files, the weights, and the caches at full length.
    `portable` of the `executables` are portable. `buckets` are those that the server warms up. `host_memory`: weights
    and cache are in the host's memory. `shaped`: executables fix a dimension.
    """

    costs: Costs
    host_memory: bool
    size: int
    weight_bytes: int
    cache_bytes: int
    layers: int
    parameters: int
    executables: int
    portable: int
    buckets: Sequence[Bucket]
    shaped: bool

    @property
    def host_bytes(self) -> int:
        """Host memory in bytes, rounded up to MiB: the mapped files, BASE_BYTES, and the caches unless the device holds
        them."""
        needed = self.size + BASE_BYTES + (self.cache_bytes if self.host_memory else 0)
        return math.ceil(needed / (1 << 20)) << 20

    @property
    def device_bytes(self) -> int:
        """Device memory for weights and caches in bytes; 0 where host memory holds them."""
        return 0 if self.host_memory else self.weight_bytes + self.cache_bytes

    @property
    def start_seconds(self) -> float:
        """Estimated seconds from the start until the server is ready.

        The server reads its files, opens every executable and runs every bucket once; where one executable runs any
        shape, it runs only the largest bucket of each phase. The target's verification times (`Verifying`) apply. On a
        device other than the host, a portable executable takes the target's `device_seconds`.
        """
        times, size = self.costs.verifying, (self.layers, self.parameters)
        seconds = self.size / READ_BYTES_S + self.executables * times.opened.of(*size)
        seconds += self.portable * self.costs.device_seconds
        if not self.host_memory:
            return seconds
        buckets = self.buckets
        if not self.shaped:
            buckets = tuple({b.phase: b for b in sorted(buckets, key=lambda b: b.tokens)}.values())
        tokens = sum(b.tokens for b in buckets if b.phase == "prompt")
        return seconds + len(buckets) * times.step.of(*size) + tokens / 1000 * times.tokens.of(*size)
