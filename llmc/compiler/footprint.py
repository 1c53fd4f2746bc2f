"""What a plan costs on a device before it is compiled: executables, time, weights, KV cache, graph memory.

Every number names its source: a formula over the model's configuration, a published measurement, or what this
machine's store, a bundle's builds or a bench file measured; a measurement wins.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING

from llmc.buckets.bench_file import Bench
from llmc.buckets.bucket import Bucket
from llmc.buckets.limits import Limits
from llmc.buckets.text_table import table
from llmc.compiler.checkpoint import read_config
from llmc.compiler.model_size import ModelSize, Weights
from llmc.compiler.options import CompileOptions
from llmc.compiler.targets import open_target
from llmc.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from pathlib import Path

    from llmc.artifacts.bundle import BundleFiles
    from llmc.artifacts.entries import Entry
    from llmc.artifacts.store import Store
    from llmc.compiler.targets.base import Target
    from llmc.settings import Settings

STAGES = {"lower": 12.0, "weights": 4.0, "reference": 20.0}
"""Seconds of the stages that all executables share where the store has none to learn from; SmolLM2-135M, two cores."""

RECENT = 32
"""Builds of the store that a typical time is taken from."""


@dataclass(frozen=True)
class Estimate:
    """One number, in `unit` ("executables", "s" or "bytes"), and where it comes from."""

    name: str
    value: float
    unit: str
    source: str

    def to_dict(self) -> dict[str, object]:
        """The estimate as JSON holds it."""
        return {"name": self.name, "value": self.value, "unit": self.unit, "source": self.source}

    @property
    def shown(self) -> str:
        """The value for people."""
        if self.unit == "s":
            return f"{self.value / 60:.1f} min" if self.value >= 120 else f"{self.value:.1f} s"
        if self.unit == "bytes":
            return f"{self.value / 1e9:.2f} GB" if self.value >= 1e9 else f"{self.value / 1e6:.1f} MB"
        return f"{self.value:g}"


class Footprint:
    """Estimates for plans of one model, device, options and limits; without a model's size, of time only."""

    def __init__(
        self,
        model: ModelSize | None,
        target: Target,
        options: CompileOptions,
        limits: Limits,
        store: Store | None = None,
        bench: Bench | None = None,
        bundle: BundleFiles | None = None,
        weights: Sequence[Weights] | None = None,
    ) -> None:
        """`weights` are the checkpoint's own where they are known; None: what the model's sizes say."""
        self._model = model
        self._weights = list(weights if weights is not None else model.weights if model else [])
        self._target = target
        self._options = target.configure(options)
        self._limits = limits
        self._bench = bench
        self._store = store
        self._typical = None if store is None else typical_seconds(store, target.name)
        self._typical_source = "median of this store's last builds"
        self._bundle = bundle
        built = None if store is None or bundle is None else _built_seconds(store, bundle)
        if built is not None and bundle is not None:
            self._typical, self._typical_source = built, f"median of the builds of {bundle.folder}"

    @classmethod
    def open(
        cls,
        model: str,
        limits: Limits,
        device: str,
        settings: Settings,
        bench: str | os.PathLike[str] | None = None,
        bundle: Path | None = None,
    ) -> Footprint:
        """For a checkpoint or a config.json, compiled with a device's default options, as `settings`' store has
        measured, and of `bundle`, one compiled before. Raises CheckpointError when the model cannot be read or has no
        sizes, UnknownNameError for an unknown device, InputError for a bad bench file or a bundle for another device,
        and ArtifactError for what is no bundle.
        """
        from llmc.artifacts.bundle import BundleFiles
        from llmc.artifacts.store import Store

        files = None if bundle is None else BundleFiles.open(bundle)
        if files is not None and files.manifest.device != device:
            raise InputError(f"{bundle} is for device {files.manifest.device}, not {device}; name that device")

        return cls(
            ModelSize.of(read_config(model), model),
            open_target(device),
            CompileOptions(device, jobs=settings.threads),
            limits,
            Store(settings.cache_dir) if settings.cache_dir.is_dir() else None,
            None if bench is None else Bench.load(bench),
            files,
        )

    def executables(self, buckets: Sequence[Bucket]) -> int:
        """Distinct executables that serve the buckets on the device."""
        return len(self._target.shapes(buckets, self._options))

    @property
    def seconds_each(self) -> float:
        """Seconds that one executable more takes on this host."""
        if self._typical is not None:
            return self._typical / max(1, self._options.jobs)
        return self._target.executable_seconds

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as the bundle holds them."""
        return int(sum(one.count * self._target.weight_bits(self._options, one) for one in self._weights) / 8)

    def compile_seconds(self, buckets: Sequence[Bucket]) -> float:
        """Seconds to compile all executables of the buckets, one after another or as many at once as jobs."""
        return self._compile_time(buckets).value

    def graph_bytes(self, buckets: Sequence[Bucket]) -> int:
        """Bytes that all executables of the buckets take when open, weights and KV cache not counted."""
        return int(self._graph_memory(buckets).value)

    def estimates(self, buckets: Sequence[Bucket]) -> list[Estimate]:
        """Everything, in the order of `text`."""
        found = [
            Estimate(
                "executables",
                self.executables(buckets),
                "executables",
                f"{len(buckets)} buckets; fixed on this device: "
                f"{', '.join(self._target.static_dims(self._options)) or 'none, one executable runs every shape'}",
            ),
            self._compile_time(buckets),
        ]
        return found if self._model is None else [*found, *self._memory(self._model), self._graph_memory(buckets)]

    def _memory(self, model: ModelSize) -> list[Estimate]:
        limits, value_bytes = self._limits, self._target.cache_bytes(self._options)
        weights, count = self.weight_bytes, sum(one.count for one in self._weights)
        source = f"{count / 1e6:,.1f} M parameters × {8 * weights / count:.3g} bits on average"
        if self._bundle is not None:
            manifest = self._bundle.manifest
            weights = sum(manifest.blobs[blob] for name, blob in manifest.files.items() if name.startswith("weights"))
            source = f"as they are in {self._bundle.folder}"
        return [
            Estimate("weights", weights, "bytes", source),
            Estimate(
                "KV cache",
                limits.max_num_seqs * limits.max_model_len * model.cache_values * value_bytes,
                "bytes",
                f"{limits.max_num_seqs} sequences × {limits.max_model_len} tokens × {model.cache_values:,} values × "
                f"{value_bytes} bytes",
            ),
        ]

    def text(self, buckets: Sequence[Bucket]) -> str:
        """The estimates as a table, each with its source; ends in a newline."""
        rows = [(estimate.name, estimate.shown, estimate.source) for estimate in self.estimates(buckets)]
        head = [f"estimated for device {self._target.name}:"]
        return "\n".join([*head, *table(rows)]) + "\n"

    def _compile_time(self, buckets: Sequence[Bucket]) -> Estimate:
        count = self.executables(buckets)
        measured = self._measured("compile_seconds")
        each = self.seconds_each if measured is None else measured
        if measured is not None:
            source = "measured in the bench file"
        else:
            source = self._target.executable_source if self._typical is None else self._typical_source
        source = f"{count} × {each:.2f} s ({source})"
        if measured is None and self._target.device_seconds:
            each += self._target.device_seconds
            source += f" and × {self._target.device_seconds:.1f} s ({self._target.device_source})"
        fixed = sum(stage_seconds(self._store, stage) for stage in STAGES)
        return Estimate("compile time", fixed + count * each, "s", f"{fixed:.0f} s of shared stages, {source}")

    def _graph_memory(self, buckets: Sequence[Bucket]) -> Estimate:
        shapes = self._target.shapes(buckets, self._options)
        known: dict[tuple[str, int | None, int | None, int | None], int] = {}
        if self._bench is not None:
            for one in self._bench.measurements:
                if one.memory_bytes is not None:
                    bucket = one.bucket
                    known[bucket.phase, bucket.batch, bucket.query, bucket.context] = one.memory_bytes
        if self._model is None:
            raise CheckpointError("the model's sizes are not known, so graph memory cannot be estimated")
        largest = self._target.step_tokens(max(bucket.tokens for bucket in buckets), self._options)
        total = 0
        found = 0
        for shape in shapes:
            measured = known.get((shape.phase, shape.batch, shape.query, shape.context))
            found += measured is not None
            tokens = largest if shape.query is None or shape.batch is None else shape.batch * shape.query
            total += self._target.graph_bytes(self._model, tokens) if measured is None else measured
        source = self._target.graph_bytes_source
        if found:
            source = f"{found} of {len(shapes)} measured in the bench file" + (
                f", else {source}" * (found < len(shapes))
            )
        return Estimate("graph memory", total, "bytes", source)

    def _measured(self, name: str) -> float | None:
        if self._bench is None:
            return None
        values = [getattr(one, name) for one in self._bench.measurements if getattr(one, name) is not None]
        return float(median(values)) if values else None


def typical_seconds(store: Store, target: str) -> float | None:
    """The median build time of the target's last executables in the store; None where there are none."""
    return _median_seconds(
        entry for entry in store.entries("executable") if entry.key.components.get("target") == target
    )


def _built_seconds(store: Store, bundle: BundleFiles) -> float | None:
    """The median build time of a bundle's own executables, as far as the store still has them."""
    keys = {executable.key for executable in bundle.manifest.executables}
    return _median_seconds(entry for entry in store.entries("executable") if entry.key.digest in keys)


def stage_seconds(store: Store | None, stage: str) -> float:
    """Seconds that a shared stage takes: the median of the store's last builds, or what was once measured."""
    typical = None if store is None else _median_seconds(store.entries(stage))
    return STAGES[stage] if typical is None else typical


def _median_seconds(entries: Iterable[Entry]) -> float | None:
    timed = (float(entry.meta["seconds"]) for entry in entries if "seconds" in entry.meta)
    recent = list(islice(timed, RECENT))
    return median(recent) if recent else None
