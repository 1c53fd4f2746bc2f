"""The file of `llmc plan --fleet`, YAML or JSON, with the schema fleet.schema.json; and what its entries cost."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.errors import CheckpointError, InputError, LlmcError
from llmc.files import read_text
from llmc.fleet.simulate import BackOff, Network, Nodes, Peers, RegistryServer
from llmc.platforms import missing
from llmc.strict_json import loads

if TYPE_CHECKING:
    from llmc.buckets.bucket import Bucket
    from llmc.compiler.estimates.footprint import Footprint
    from llmc.deploy.facts import BundleFacts
    from llmc.settings import Settings


@dataclass(frozen=True)
class FleetEntry:
    """`replicas` nodes, each with a server of `bundle`, or of `model` compiled for `device`.

    The model's plan is the file `plan`, or made with the arguments `planning` of `plan_for`; `options` are compile
    options by name. `name` is the bundle or model as written.
    """

    name: str
    replicas: int
    bundle: str | None = None
    model: str | None = None
    device: str = "cpu"
    plan: str | None = None
    planning: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Description:
    """A fleet as described in its file; times in seconds. `max_cold_start_s` is None for no bound."""

    models: tuple[FleetEntry, ...]
    network: Network
    max_cold_start_s: float | None = None


def read(path: str) -> Description:
    """Read a fleet description; paths in it are relative to its folder.

    Raises InputError, naming the file, the location and the allowed values; DeviceError without jsonschema.
    """
    import yaml

    try:
        document = loads(json.dumps(yaml.safe_load(read_text(path, "fleet"))))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: neither YAML nor JSON: {' '.join(str(error).split())}") from None
    _check(document, path)
    network = Network(
        RegistryServer(**document.get("registry", {})), Nodes(**document.get("nodes", {})),
        BackOff(**document.get("back_off", {})), Peers(**document.get("peers", {})), document.get("seed", 0),
    )  # fmt: skip
    models = [one for at, entry in enumerate(document["models"]) for one in _requested(entry, path, at)]
    return Description(tuple(models), network, document.get("max_cold_start_s"))


def _requested(entry: Mapping[str, Any], path: str, at: int) -> list[FleetEntry]:
    location, given = f"{path}: models[{at}]", dict(entry)
    if ("bundle" in given) == ("model" in given):
        raise InputError(f"{location}: name a bundle, or a model and its device: one of the two")
    more = [name for name in ("device", "plan", "planning", "options") if name in given]
    if "bundle" in given and more:
        raise InputError(f"{location}: a bundle was compiled already; leave out {', '.join(more)}")
    if "plan" in given and "planning" in given:
        raise InputError(f"{location}: plan and planning were both given; give one of them")
    folder, name = Path(path).parent, given.get("bundle") or given["model"]
    for file in ("bundle", "model", "plan"):
        if file in given and (file == "plan" or (folder / given[file]).exists()):
            given[file] = str(folder / given[file])
    devices = given.pop("device", "cpu")
    return [FleetEntry(name, **given, device=one) for one in ([devices] if isinstance(devices, str) else devices)]


def _check(document: object, path: str) -> None:
    try:
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import best_match
    except ImportError:
        raise missing("jsonschema") from None
    error: Any = best_match(Draft202012Validator(_schema()).iter_errors(document))
    if error is None:
        return
    location = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path).lstrip(".")
    said = error.message if len(error.message) <= 200 else f"{error.message[:200]}…"
    if error.validator == "additionalProperties":
        known = error.schema["properties"]
        name = next(name for name in map(str, error.instance) if name not in known)
        near = get_close_matches(name, known, n=1, cutoff=0.7)
        said = f"unknown key {name!r}; known: {', '.join(known)}" + (f"; did you mean {near[0]!r}?" if near else "")
    raise InputError(f"{path}: {location + ': ' if location else ''}{said}")


@cache
def _schema() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((files("llmc.fleet") / "fleet.schema.json").read_text())
    return found


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
