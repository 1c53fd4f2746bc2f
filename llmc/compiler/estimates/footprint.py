"""Cost of a plan on a device before it is compiled: executables, time, weights, KV cache, graph memory.

Every number names its source: a formula over the model's configuration, a published measurement, or a measurement from
this store, a bundle's builds or a bench file. Measurements take precedence.
"""

from __future__ import annotations

import math
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from llmc.buckets.bucket import Bucket
from llmc.buckets.cost.bench import Bench
from llmc.buckets.limits import Limits
from llmc.buckets.render.text import counted, table
from llmc.compiler.architectures.shared.architectures import size_of
from llmc.compiler.architectures.shared.size import ModelSize, Weights
from llmc.compiler.checkpoint import DEMO, Checkpoint, open_checkpoint, read_config
from llmc.compiler.estimates.durations import Durations, count, of_target, typical
from llmc.compiler.model_size import weights_of
from llmc.compiler.options import CompileOptions
from llmc.compiler.targets.costs import DTYPE_BITS, Costs
from llmc.errors import CheckpointError, InputError
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.artifacts.bundle.reader import BundleFiles
    from llmc.artifacts.store.store import Store
    from llmc.compiler.targets.base import Target


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


CACHE = "its KV cache"
TOKEN_BYTES = 76
"""Bytes of tokenizer.json and its index per token."""


class Footprint:
    """Estimates for plans of one model, device, configured options and limits; without a model's size, of time only."""

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
        turns: Sequence[int] = (),
    ) -> None:
        """`weights` are the checkpoint's own where known; None derives them from the model's sizes. `turns` are the
        positions where the model's behaviour changes (verification/probes.py)."""
        self._half = ""
        self._model = model
        self._weights = list(weights if weights is not None else model.weights if model else [])
        self._target, self._costs = target, target.costs
        self._options, self._why = options, ""
        self._limits = limits
        self._turns = turns
        self.durations = Durations(self._costs, self._options, model, sum(w.count for w in self._weights), store)
        self._bench = bench
        self._store = store
        self._typical = None if store is None else typical(of_target(store, target.description.name))
        self._typical_source = "median of this store's last builds"
        self._bundle = bundle
        built = None if store is None or bundle is None else _built_seconds(store, bundle)
        if built is not None and bundle is not None:
            self._typical, self._typical_source = built, f"median of the builds of {bundle.folder}"

    @classmethod
    def open(
        cls,
        model: str | Checkpoint,
        limits: Limits,
        device: str,
        settings: Settings,
        bench: str | os.PathLike[str] | None = None,
        bundle: Path | None = None,
        options: CompileOptions | None = None,
        facts: Mapping[str, object] | None = None,
        target: Target | None = None,
    ) -> Footprint:
        """Footprint of a checkpoint or a config.json, compiled with `options` (default: the device's).

        Measurements come from the store of `settings` and from `bundle`, an earlier compile. The device `cpu` resolves
        as in a compile, with a plan's `facts`. Raises CheckpointError when the model cannot be read or has no sizes,
        UnknownNameError for an unknown device, InputError for options that the device does not offer, a bad bench file
        or a bundle for another device, and ArtifactError for a path that is not a bundle.
        """
        from llmc.artifacts.bundle.reader import BundleFiles
        from llmc.artifacts.store.store import Store
        from llmc.compiler.targets import open_target
        from llmc.compiler.targets.base import Deployment
        from llmc.compiler.verification.probes import turns_of

        files = None if bundle is None else BundleFiles.open(bundle)
        if files is not None and files.manifest.device != device:
            raise InputError(f"{bundle} is for device {files.manifest.device}, not {device}; name that device")

        config = read_config(model)
        size = size_of(config, model if isinstance(model, str) else model.requested)
        weights = _stored(model) or size.weights
        requested = replace(options or CompileOptions(device), jobs=settings.threads)
        deployment = Deployment(limits, facts or {}, config, weights)
        resolved = (target or open_target(requested.device, settings)).resolve(requested, deployment)
        found = cls(
            size,
            resolved.target,
            resolved.options,
            limits,
            Store(settings.cache_dir) if settings.cache_dir.is_dir() else None,
            None if bench is None else Bench.load(bench),
            files,
            weights,
            turns_of(config),
        )
        found._why = "; ".join(filter(None, (resolved.why, resolved.decided)))
        found._half = str(config.get("dtype") or config.get("torch_dtype"))
        return found

    def executables(self, buckets: Sequence[Bucket]) -> int:
        """Distinct executables that serve the buckets on the device."""
        return len(self._target.shapes(buckets, self._options))

    @property
    def seconds_each(self) -> float:
        """Seconds that one more executable takes on this host."""
        if self._typical is not None:
            return self._typical / max(1, self._options.jobs)
        return self._costs.executable_seconds

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as the bundle holds them."""
        return int(sum(one.count * self._costs.weight_bits(self._options, one) for one in self._weights) / 8)

    @property
    def cache_token_bytes(self) -> int:
        """Bytes of one token in the KV cache, all layers. Raises CheckpointError for a model of unknown sizes."""
        model = self._sized(CACHE)
        return self._cache_bytes(model.cache_values, model.cache_heads)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's recurrent state, all layers; 0 for most models. Raises CheckpointError for unknown
        sizes."""
        return self._sized(CACHE).state_bytes(DTYPE_BITS[self._options.dtype] // 8)

    @property
    def sequence_bytes(self) -> int:
        """Bytes of a full-length sequence in the device's cache, with ring buffers and recurrent state. Raises
        CheckpointError for a model of unknown sizes."""
        values, heads, _ = self._held(self._sized(CACHE))
        return self._cache_bytes(values, heads) + self.state_bytes

    def compile_seconds(self, buckets: Sequence[Bucket]) -> float:
        """Seconds to compile all executables of the buckets, as many at once as jobs."""
        return self.compile_time(buckets).value

    def verification_seconds(self, buckets: Sequence[Bucket], reference: bool = True) -> float:
        """Seconds of verification; `reference` False leaves out the reference's run."""
        if self._options.verify == "none":
            return 0.0
        work = count(
            buckets, self._limits, self._target, self._options, sum(w.count for w in self._weights), self._turns
        )
        return self.durations.verification(work, reference)

    def measured(self, buckets: Sequence[Bucket]) -> dict[str, bool]:
        """Whether each part of the compile time was measured (True) or estimated."""
        found = {kind: self.durations.measured(kind) is not None for kind in self.durations.stages(buckets)}
        found["executables"] = self._typical is not None or self._measured("compile_seconds") is not None
        if self._costs.device_seconds and self._measured("compile_seconds") is None:
            found["the device's own compiler"] = False
        return found | ({"verification": False} if self.verification_seconds(buckets) else {})

    def server(self, buckets: Sequence[Bucket]) -> ServerEstimate:
        """Estimate of a server of the bundle. Raises CheckpointError for a model of unknown sizes, and InputError for a
        device that no single server has."""
        executables = self.executables(buckets)
        return ServerEstimate(
            self._costs, self._target.hosting(self._options.to_dict()).host_memory, self.bundle_bytes(buckets),
            self.weight_bytes, self._limits.max_num_seqs * self.sequence_bytes, self._sized(CACHE).layers,
            sum(one.count for one in self._weights), executables,
            executables if self._target.state == "portable" else 0, buckets,
            bool(self._target.fixes(self._options).dims),
        )  # fmt: skip

    def graph_bytes(self, buckets: Sequence[Bucket]) -> int:
        """Bytes that all open executables of the buckets take, without weights and KV cache."""
        return int(self._graph_memory(buckets).value)

    def executable_bytes(self, bucket: Bucket) -> int:
        """Bytes of a bucket's executable alone, without shared memory. Raises CheckpointError."""
        return self._costs.graph_bytes(self._sized("graph memory"), bucket, self._options)

    def estimates(self, buckets: Sequence[Bucket]) -> list[Estimate]:
        """All estimates, in the order of `text`."""
        found = [
            Estimate(
                "executables",
                self.executables(buckets),
                "executables",
                f"{counted(len(buckets), 'bucket')}; fixed on this device: "
                f"{', '.join(self._target.fixes(self._options).dims) or 'none, one executable runs every shape'}",
            ),
            self.compile_time(buckets),
        ]
        return found if self._model is None else [*found, *self._memory(self._model), self._graph_memory(buckets)]

    def _memory(self, model: ModelSize) -> list[Estimate]:
        weights, count = self.weight_bytes, sum(one.count for one in self._weights)
        bits = 8 * weights / count
        source = f"{count / 1e6:,.1f} M parameters × {bits:.3g} bits on average"
        if (active := model.active_parameters) < model.parameters:
            source += f"; {active / 1e6:,.1f} M active, which one token reads"
        half = {"bfloat16": "bf16", "float16": "f16"}.get(self._half)
        if bits == 32 and half in self._target.description.dtypes:
            source += f" (the config says {self._half}: --dtype {half} holds half of it)"
        if self._bundle is not None:
            manifest = self._bundle.manifest
            weights = sum(manifest.blobs[blob] for name, blob in manifest.files.items() if name.startswith("weights"))
            source = f"as they are in {self._bundle.folder}"
        if (devices := self._costs.devices(self._options)) > 1:
            source += f"; about {weights / devices / 1e9:.2f} GB on each of {devices} devices"
        return [Estimate("weights", weights, "bytes", source), *self._cache(model)]

    def _cache(self, model: ModelSize) -> list[Estimate]:
        """Estimates of the cache, which grows with tokens, and of recurrent state; absent parts are left out."""
        limits, value_bytes = self._limits, self._costs.cache_bytes(self._options)
        found = []
        if model.cache_values:
            values, heads, said = self._held(model)
            each = self._cache_bytes(values, heads)
            source = f"{limits.max_num_seqs} sequences × {said} × {value_bytes} bytes"
            if beside := self._costs.cache_scale_bytes(self._options):
                half = 2 * values * limits.max_num_seqs // each
                source += f" and {beside} bytes of each scale; {half} fit where 16 bits hold {limits.max_num_seqs}"
            found.append(Estimate("KV cache", limits.max_num_seqs * each, "bytes", source))
        if each := self.state_bytes:
            source = f"{limits.max_num_seqs} sequences × {each:,} bytes, for any number of tokens"
            found.append(Estimate("states", limits.max_num_seqs * each, "bytes", source))
        return found

    def _cache_bytes(self, values: int, heads: int) -> int:
        costs, options = self._costs, self._options
        return values * costs.cache_bytes(options) + heads * costs.cache_scale_bytes(options)

    def _held(self, model: ModelSize) -> tuple[int, int, str]:
        """Values of a full-length sequence in the cache, their heads, and how they are counted."""
        longest = self._limits.max_model_len
        said = f"{longest} tokens × {model.cache_values:,} values"
        plain = longest * model.cache_values, longest * model.cache_heads, said
        if model.cache is None:
            return plain
        cache = self._target.held_cache(model.cache, self._limits, self._options)
        rings = Counter[int]()
        for t in cache.kv:
            rings += Counter() if t.ring is None else Counter({t.ring: t.values})
        if not rings:
            return plain
        whole = model.cache_values - rings.total()
        parts = [f"{longest} tokens × {whole:,} values"] if whole else []
        parts += [f"ring buffers of {ring} tokens × {values:,} values" for ring, values in sorted(rings.items())]
        heads = sum(t.token_slots(longest) * t.shape[0] for t in cache.kv)
        return cache.kv_values(longest), heads, f"({' + '.join(parts)})"

    def text(self, buckets: Sequence[Bucket]) -> str:
        """Table of the estimates with their sources, ending in a newline."""
        rows = [(estimate.name, estimate.shown, estimate.source) for estimate in self.estimates(buckets)]
        name = self._options.device
        of = f" ({self._target.recorded(self._options).executor}: {self._why})" if self._why else ""
        warned = [f"warning: {warning}" for warning in self.warnings(buckets)]
        return "\n".join([f"estimated for device {name}{of}:", *table(rows), *warned]) + "\n"

    def bundle_bytes(self, buckets: Sequence[Bucket]) -> int:
        """Bytes that a compile writes to disk: weights, executables, and tokenizer files."""
        vocabulary = self._model.vocabulary * TOKEN_BYTES if self._model is not None else 0
        return self.weight_bytes + self.executables(buckets) * self._costs.executable_bytes + vocabulary

    def warnings(self, buckets: Sequence[Bucket], free: int | None = None) -> list[str]:
        """Warnings for estimates above an hour, the memory or the disk, each with the flags that reduce it.

        `free`: free bytes on the disk, by default the store's.
        """
        return beyond(
            self.estimates(buckets), self.executables(buckets) > 1, self.bundle_bytes(buckets), self._target,
            self._options, self._store, free,
        )  # fmt: skip

    def compile_time(self, buckets: Sequence[Bucket]) -> Estimate:
        """Compile time, with its source."""
        count = self.executables(buckets)
        measured = self._measured("compile_seconds")
        each = self.seconds_each if measured is None else measured
        if measured is not None:
            source = "measured in the bench file"
        else:
            source = self._costs.executable_source if self._typical is None else self._typical_source
        source = f"{count} × {each:.2f} s ({source})"
        if measured is None and self._costs.device_seconds:
            each += self._costs.device_seconds
            source += f" and × {self._costs.device_seconds:.1f} s ({self._costs.device_source})"
        fixed, verify = sum(self.durations.stages(buckets).values()), self.verification_seconds(buckets)
        parts = f"{duration(fixed)} of shared stages, {source}"
        if verify:
            parts += f", {duration(verify)} of verification against the reference model"
        return Estimate("compile time", fixed + count * each + verify, "s", parts)

    def _graph_memory(self, buckets: Sequence[Bucket]) -> Estimate:
        model = self._sized("graph memory")
        shapes = self._costs.open_at_once(self._target.shapes(buckets, self._options), model, self._options)
        known: dict[tuple[str, int | None, int | None, int | None], int] = {}
        if self._bench is not None:
            for one in self._bench.measurements:
                if one.memory_bytes is not None:
                    bucket = one.bucket
                    known[bucket.phase, bucket.batch, bucket.query, bucket.context] = one.memory_bytes
        any_shape = Bucket("prompt", 1, self._costs.step_tokens(max(b.tokens for b in buckets), self._options), 0)
        total = shared = found = 0
        for shape in shapes:
            measured = known.get((shape.phase, shape.batch, shape.query, shape.context))
            if measured is not None:
                found += 1
                total += measured
                continue
            bucket = any_shape
            if shape.batch is not None and shape.query is not None:
                bucket = Bucket(
                    "decode" if shape.query == 1 else "prompt", shape.batch, shape.query, shape.context or 0
                )
            total += self._costs.graph_bytes(model, bucket, self._options)
            shared = max(shared, self._costs.workspace_bytes(model, bucket, self._options))
        total += shared
        source = self._costs.graph_bytes_source
        if found:
            source = f"{found} of {len(shapes)} measured in the bench file" + (
                f", else {source}" * (found < len(shapes))
            )
        return Estimate("graph memory", total, "bytes", source)

    def _sized(self, what: str) -> ModelSize:
        if self._model is None:
            raise CheckpointError(f"the model's sizes are not known, so {what} cannot be estimated")
        return self._model

    def _measured(self, name: str) -> float | None:
        if self._bench is None:
            return None
        values = [getattr(one, name) for one in self._bench.measurements if getattr(one, name) is not None]
        return float(median(values)) if values else None


def _stored(model: str | Checkpoint) -> list[Weights]:
    """Weights of a checkpoint on this host; never downloads one."""
    if isinstance(model, str) and model != DEMO and not Path(model).expanduser().exists():
        return []
    try:
        return weights_of(open_checkpoint(model))
    except CheckpointError:
        return []


def _built_seconds(store: Store, bundle: BundleFiles) -> float | None:
    """Median build time of those of a bundle's executables that the store still has."""
    keys = {executable.key for executable in bundle.manifest.executables}
    return typical(entry for entry in store.entries("executable") if entry.key.digest in keys)
