"""What a deployment is told of a bundle, from its manifest alone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from llmc.compiler.estimates.estimate import ServerEstimate
from llmc.compiler.targets.hosting import Hosting
from llmc.deploy.quoting import label
from llmc.errors import ArtifactError, InputError

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Manifest
    from llmc.buckets.plan import Plan
    from llmc.compiler.targets.base import Target
    from llmc.runtime.bundle import Bundle

MARGIN = 3
"""How much longer than estimated a start may take, before it counts as failed."""
LEAST_BUDGET_S = 60
_PACKAGE = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,98}[a-z0-9])?")
_VERSION = re.compile(r"[0-9][0-9a-z.]{0,60}")
_NONE = ("fake", "llmc", "python")
"""What is no package, or comes as a wheel."""
_WORD = re.compile(r"[a-z0-9_]{1,20}")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class BundleFacts:
    """Of one bundle. Sizes in bytes, times in seconds."""

    bundle: Bundle
    target: Target

    @classmethod
    def of(cls, bundle: Bundle) -> BundleFacts:
        """Raises UnknownNameError for a device, and InputError for one that no single server has, or a bundle without
        weights; ArtifactError for sizes of its cache that are none."""
        from llmc.compiler.targets import open_target

        if bundle.manifest.is_unbound:
            raise InputError(
                f"{bundle.path}: compiled from a configuration alone, it holds no weights that a server could start "
                "with; compile the checkpoint: llmc compile MODEL"
            )
        manifest = bundle.manifest
        named = manifest.device.partition(":")[0] == manifest.target
        return cls(bundle, open_target(manifest.device if named else manifest.target, bundle.settings))

    @property
    def manifest(self) -> Manifest:
        """What all is read from."""
        return self.bundle.manifest

    @property
    def model(self) -> str:
        """The model's name as the manifest has it: any text."""
        return str(self.manifest.model.get("name") or self.manifest.provenance.get("model") or "model")

    @property
    def label(self) -> str:
        """The same as a name in Kubernetes."""
        return label(self.model)

    @property
    def digest(self) -> str:
        """The bundle's identity."""
        return self.manifest.digest

    @cached_property
    def plan(self) -> Plan:
        """Its buckets."""
        return self.bundle.plan if self.bundle.task == "generate" else self.bundle.encode_plan

    @property
    def plan_json(self) -> str:
        """The plan as `llmc compile --plan` takes it."""
        return json.dumps(self.manifest.plan, indent=1, sort_keys=True) + "\n"

    @property
    def hosting(self) -> Hosting:
        """What its device needs of a host."""
        return self.target.hosting(self.manifest.options)

    @property
    def native(self) -> bool:
        """Whether it holds code, which comes from elsewhere only with a trusted signature."""
        from llmc.artifacts.bundle.native import code_of_bundle

        return code_of_bundle(self.manifest) is not None

    @property
    def portable(self) -> int:
        """Executables that the device's own host still has to finish."""
        return sum(one.state == "portable" for one in self.manifest.executables)

    @property
    def architecture(self) -> str:
        """Kubernetes' name of the processors that it needs; "" for any."""
        return next((found for name, found in _ARCHITECTURES.items() if name in self.manifest.isa), "")

    @property
    def cache_bytes(self) -> int:
        """Of the caches of all sequences at full length."""
        return self.bundle.cache_bytes

    @cached_property
    def server(self) -> ServerEstimate:
        """What one of it takes. Weights are taken for the number of parameters: at least as many, unless they have less
        than 8 bits."""
        manifest = self.manifest
        weights = sum(manifest.blobs[blob] for name, blob in manifest.files.items() if name.startswith("weights"))
        return ServerEstimate(
            self.target.costs, self.hosting.host_memory, manifest.size, weights, self.cache_bytes,
            int(manifest.model.get("layers", 1)), weights, len(manifest.executables), self.portable, self.plan.buckets,
            bool(manifest.options.get("static_dims")),
        )  # fmt: skip

    @property
    def memory_mib(self) -> int:
        """Memory of its host in MiB."""
        return self.server.host_bytes >> 20

    @property
    def start_budget(self) -> int:
        """Seconds after which a server that is not ready counts as failed."""
        return max(LEAST_BUDGET_S, math.ceil(MARGIN * self.server.start_seconds))

    @property
    def constraints(self) -> str:
        """The packages that compiled it, as pip's constraints: an executor refuses what another version compiled. What
        the manifest names and is no package of an index (a flag, a build behind "+") is left out."""
        run: Any = self.manifest.provenance.get("runDetails")
        builder = run.get("builder") if isinstance(run, Mapping) else None
        versions = builder.get("version") if isinstance(builder, Mapping) else None
        found = {**(versions if isinstance(versions, Mapping) else {}), **self.manifest.toolchain}
        pins = {name: str(version).partition("+")[0] for name, version in found.items() if _PACKAGE.fullmatch(name)}
        kept = sorted(name for name, version in pins.items() if _VERSION.fullmatch(version) and name not in _NONE)
        return "".join(f"{name}=={pins[name]}\n" for name in kept)

    @property
    def compile_flags(self) -> tuple[str, ...]:
        """Of `llmc compile`, beside the model, the plan and -o: those that made it. Each is one word, without blanks.
        Raises ArtifactError for values that no compile writes."""
        options = self.manifest.options
        flags = ["--device", self.manifest.device]
        for name in ("quantize", "dtype"):
            if (value := options.get(name)) is None:
                continue
            if not isinstance(value, str) or not _WORD.fullmatch(value):
                raise ArtifactError(
                    f"{self.bundle.path}: options.{name} in its manifest is {value!r:.80}; compile it again"
                )
            flags += [f"--{name}", value]
        if isinstance(options.get("specialise"), bool):
            flags.append("--specialise" if options["specialise"] else "--no-specialise")
        return tuple(flags)
