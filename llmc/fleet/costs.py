"""Costs of a fleet's entry: read from its bundle, or estimated as in `llmc plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.errors import CheckpointError, InputError, LlmcError
from llmc.fleet.description import FleetEntry

if TYPE_CHECKING:
    from llmc.buckets.bucket import Bucket
    from llmc.compiler.estimates.footprint import Footprint
    from llmc.deploy.facts import BundleFacts
    from llmc.settings import Settings


@dataclass(frozen=True)
class Cost:
    """Costs of one entry; times in seconds, sizes in bytes.

    `blobs` are keyed by identity, so that equal ones count once: by digest for a bundle, otherwise by their inputs.
    `layers` are those of the image that nodes pull, largest first. `source` is the origin of the compile time,
    `measured` its measured parts.
    """

    name: str
    device: str
    replicas: int
    exists: bool
    compile_s: float
    source: str
    measured: Mapping[str, bool]
    executables: int
    blobs: Mapping[str, int]
    layers: Sequence[int]
    start_s: float
    host_bytes: int
    device_bytes: int

    @property
    def label(self) -> str:
        """Name in reports."""
        return self.name if self.exists else f"{self.name} {self.device}"

    @property
    def size(self) -> int:
        """Bytes that a node pulls."""
        return sum(self.layers)

    @property
    def basis(self) -> str:
        """ "measured", "estimated", or "in part", for the compile time."""
        known = set(self.measured.values())
        return "in part" if len(known) == 2 else "measured" if known == {True} else "estimated"


def cost_of(requested: FleetEntry, settings: Settings) -> Cost:
    """Return the costs of an entry, without compiling.

    Raises LlmcError like `llmc plan` and `llmc deploy`, naming the entry: an unknown device, a missing bundle or plan,
    a model whose plan fails.
    """
    try:
        return _of_bundle(requested, settings) if requested.bundle is not None else _of_model(requested, settings)
    except LlmcError as error:
        error.args = (f"{requested.name}: {error}",)
        raise


def _of_bundle(requested: FleetEntry, settings: Settings) -> Cost:
    from llmc.artifacts.local.references import resolve
    from llmc.artifacts.oci.image import split
    from llmc.deploy.facts import BundleFacts
    from llmc.runtime.bundle import Bundle

    bundle = Bundle.open(resolve(str(requested.bundle), settings), settings)
    if bundle.task != "generate":
        raise InputError(f"a bundle to {bundle.task}; a fleet is planned of models that generate")
    facts = BundleFacts.of(bundle)
    manifest, server = facts.manifest, facts.server
    return Cost(
        requested.name, manifest.device, requested.replicas, True, **_compile(_footprint(facts), bundle.plan.buckets),
        executables=len(manifest.executables), blobs=manifest.blobs,
        layers=[*(layer.size for layer in split(manifest.blobs)), len(manifest.to_bytes())],
        start_s=server.start_seconds, host_bytes=server.host_bytes, device_bytes=server.device_bytes,
    )  # fmt: skip


def _footprint(facts: BundleFacts) -> Footprint:
    """Of the model that a bundle was compiled from; of its weights only where the model is not on this host."""
    from llmc.artifacts.store.store import Store
    from llmc.compiler.architectures.shared.size import Weights
    from llmc.compiler.checkpoint import DEMO
    from llmc.compiler.estimates.footprint import Footprint
    from llmc.compiler.pipeline.provenance import find_model
    from llmc.compiler.pipeline.resolve import recorded_options

    manifest, plan, settings = facts.manifest, facts.bundle.plan, facts.bundle.settings
    options = recorded_options(manifest, facts.target)
    store, known = Store(settings.cache_dir), manifest.provenance
    model = find_model(store, str(known.get("checkpoint", "")), str(known.get("model", "")))
    if model == DEMO or Path(model).expanduser().exists():
        with suppress(CheckpointError):
            return Footprint.open(
                model, plan.limits, manifest.device, settings, None, facts.bundle.path, options, plan.provenance.facts
            )
    weights = [Weights(facts.server.parameters)]
    return Footprint(None, facts.target, options, plan.limits, store, None, facts.bundle.files, weights)


def _of_model(requested: FleetEntry, settings: Settings) -> Cost:
    from llmc.buckets.plan import Plan
    from llmc.compiler.estimates.footprint import Footprint
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.pipeline.planning import plan_for

    options = CompileOptions.of(requested.device, **requested.options)
    if requested.plan is not None:
        plan = Plan.load(requested.plan)
    else:
        plan = plan_for(
            requested.model, device=requested.device, options=options, settings=settings, **requested.planning
        )
    footprint = Footprint.open(
        str(requested.model), plan.limits, requested.device, settings, options=options, facts=plan.provenance.facts
    )
    server = footprint.server(plan.buckets)
    alike = f"{requested.model} {requested.device} {sorted(requested.options.items())}"
    blobs = {
        f"weights {alike}": server.weight_bytes,
        f"executables {alike} {plan.digest()}": server.size - server.weight_bytes,
    }
    return Cost(
        requested.name, requested.device, requested.replicas, False, **_compile(footprint, plan.buckets),
        executables=server.executables, blobs=blobs, layers=list(blobs.values()),
        start_s=server.start_seconds, host_bytes=server.host_bytes, device_bytes=server.device_bytes,
    )  # fmt: skip


def _compile(footprint: Footprint, buckets: Sequence[Bucket]) -> dict[str, Any]:
    time = footprint.compile_time(buckets)
    return {"compile_s": time.value, "source": time.source, "measured": footprint.measured(buckets)}
