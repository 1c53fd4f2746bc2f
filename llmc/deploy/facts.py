"""What a deployment knows about a bundle, from its manifest alone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from llmc.compiler.estimates.footprint import ServerEstimate
from llmc.compiler.targets.description import Hosting
from llmc.deploy.quoting import label
from llmc.errors import ArtifactError, InputError

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Manifest
    from llmc.buckets.plan import Plan
    from llmc.compiler.targets.base import Target
    from llmc.runtime.bundle import Bundle

MARGIN = 3
"""A start that takes this many times the estimate counts as failed."""
LEAST_BUDGET_S = 60
_PACKAGE = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,98}[a-z0-9])?")
_VERSION = re.compile(r"[0-9][0-9a-z.]{0,60}")
_NONE = ("fake", "llmc", "python")
"""Toolchain entries that are not packages, or are installed from a wheel."""
_WORD = re.compile(r"[a-z0-9_]{1,20}")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class BundleFacts:
    """Facts about one bundle. Sizes in bytes, times in seconds."""

    bundle: Bundle
    target: Target

    @classmethod
    def of(cls, bundle: Bundle) -> BundleFacts:
        """Read a bundle's facts. Raises InputError if no server can have it or it lacks weights, and ArtifactError."""
        from llmc.compiler.targets import open_target

        if bundle.manifest.is_unbound:
            raise InputError(
                f"{bundle.path}: compiled with --config, so it has no weights for a server to start with; compile the "
                "checkpoint: llmc compile MODEL"
            )
        manifest = bundle.manifest
        named = manifest.device.partition(":")[0] == manifest.target
        return cls(bundle, open_target(manifest.device if named else manifest.target, bundle.settings))

    @property
    def manifest(self) -> Manifest:
        """The bundle's manifest."""
        return self.bundle.manifest

    @property
    def model(self) -> str:
        """The model's name in the manifest; may be any text."""
        return str(self.manifest.model.get("name") or self.manifest.provenance.get("model") or "model")

    @property
    def label(self) -> str:
        """The model's name as a Kubernetes name."""
        return label(self.model)

    @property
    def digest(self) -> str:
        """The manifest's digest."""
        return self.manifest.digest

    @cached_property
    def plan(self) -> Plan:
        """The bundle's plan."""
        return self.bundle.plan if self.bundle.task == "generate" else self.bundle.encode_plan

    @property
    def plan_json(self) -> str:
        """The plan as JSON for `llmc compile --plan`."""
        return json.dumps(self.manifest.plan, indent=1, sort_keys=True) + "\n"

    @property
    def hosting(self) -> Hosting:
        """What the device needs from a host."""
        return self.target.hosting(self.manifest.options)

    @property
    def native(self) -> bool:
        """Whether the bundle has native code, which other hosts only accept with a trusted signature."""
        from llmc.artifacts.bundle.trust import code_of_bundle

        return code_of_bundle(self.manifest) is not None

    @property
    def portable(self) -> int:
        """Number of executables that still need on-target compilation."""
        return sum(one.state == "portable" for one in self.manifest.executables)

    @property
    def architecture(self) -> str:
        """Kubernetes' name of the CPU architecture; "" for any."""
        return next((found for name, found in _ARCHITECTURES.items() if name in self.manifest.isa), "")

    @property
    def cache_bytes(self) -> int:
        """Size of the KV caches of all sequences at full length."""
        return self.bundle.cache_bytes

    @cached_property
    def server(self) -> ServerEstimate:
        """The cost of one server. Weight bytes stand for the parameter count, which they exceed unless weights have
        less than 8 bits."""
        manifest = self.manifest
        weights = sum(manifest.blobs[blob] for name, blob in manifest.files.items() if name.startswith("weights"))
        return ServerEstimate(
            self.target.costs, self.hosting.host_memory, manifest.size, weights, self.cache_bytes,
            int(manifest.model.get("layers", 1)), weights, len(manifest.executables), self.portable, self.plan.buckets,
            bool(manifest.options.get("static_dims")),
        )  # fmt: skip

    @property
    def memory_mib(self) -> int:
        """Host memory in MiB."""
        return self.server.host_bytes >> 20

    @property
    def start_budget(self) -> int:
        """Seconds after which a server that is not ready counts as failed."""
        return max(LEAST_BUDGET_S, math.ceil(MARGIN * self.server.start_seconds))

    @property
    def constraints(self) -> str:
        """Packages that compiled the bundle as pip constraints: an executor refuses what another version compiled.

        Manifest entries that are not packages of an index (a flag, a build after "+") are left out.
        """
        run: Any = self.manifest.provenance.get("runDetails")
        builder = run.get("builder") if isinstance(run, Mapping) else None
        versions = builder.get("version") if isinstance(builder, Mapping) else None
        found = {**(versions if isinstance(versions, Mapping) else {}), **self.manifest.toolchain}
        pins = {name: str(version).partition("+")[0] for name, version in found.items() if _PACKAGE.fullmatch(name)}
        kept = sorted(name for name, version in pins.items() if _VERSION.fullmatch(version) and name not in _NONE)
        return "".join(f"{name}=={pins[name]}\n" for name in kept)

    @property
    def compile_flags(self) -> tuple[str, ...]:
        """Flags of `llmc compile`, one word each, without MODEL, plan, -o. Raises ArtifactError for foreign values."""
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
