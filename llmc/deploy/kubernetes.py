"""`llmc deploy kubernetes` and `kserve`: Kubernetes manifests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from llmc.artifacts.bundle.kernel_sets import sets_in
from llmc.deploy.base import DeploymentKind, Options
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.artifacts.oci.reference import Reference


PROBE_S = 5
BUSY = 0.8
"""A server is added if more than this share of slots is in use, averaged over all servers."""


class Kubernetes(DeploymentKind):
    """A kustomize base with the device's plug-in and node labels, and a job that certifies.

    It scales by waiting and running requests with an HPA (autoscaling/v2, built into Kubernetes) over metrics of the
    Prometheus adapter. KEDA would create the same HPA but needs its own CRD.
    """

    name = "kubernetes"
    takes = (
        "bundle", "bundle_image", "image", "namespace", "replicas", "max_replicas", "port", "cpus", "pull",
        "trusted_keys", "api_key_secret", "allow_from",
    )  # fmt: skip
    needs = ("bundle", "image", "bundle_image")
    templates: ClassVar[Mapping[str, str]] = {
        f"{name}.yaml": f"kubernetes/{name}"
        for name in (
            "deployment", "service", "autoscaler", "disruption-budget", "network-policy", "kustomization",
            "warm-up-job", "prometheus-adapter-values",
        )
    }  # fmt: skip

    def values(self, options: Options) -> dict[str, Any]:
        """Template variables. Raises InputError if a pod could not pull the bundle or load its library."""
        found, facts = super().values(options), options.facts
        if options.pull and facts.native and not options.trusted_keys:
            raise InputError(
                "the bundle holds native code, which is only pulled with a trusted signature: name the ConfigMap of "
                "its public keys with --trusted-keys, or mount the image with --bundle-volume image"
            )
        if not options.pull and sets_in(facts.manifest.files):
            raise InputError(
                "the bundle has llmc's kernels, a library that cannot be loaded from an image volume (noexec): pull "
                "the bundle first with --bundle-volume pull"
            )
        slots = facts.plan.limits.max_num_seqs
        return {
            **found, **pod_values(options), "tries": math.ceil(facts.start_budget / PROBE_S), "every": PROBE_S,
            "waiting": max(1, slots // 2), "running": max(1, int(slots * BUSY)),
            "scale_period": max(15, math.ceil(facts.server.start_seconds)),
            "selector": {**found["hosting"].node_selector, **_architecture(facts.architecture)},
        }  # fmt: skip


def pod_values(options: Options) -> dict[str, Any]:
    """What pods need to know about the bundle's image: its Kubernetes name and how to reach it."""
    reference = options.bundle_image
    assert reference is not None
    return {"pulled": image_of(reference), "oci": str(reference), "registry_port": registry_port(reference)}


def image_of(reference: Reference) -> str:
    """An image name as Kubernetes writes it, without oci://."""
    return str(reference).partition("://")[2]


def registry_port(reference: Reference) -> int:
    """The port of a registry, 443 by default."""
    port = (reference.host or "").rpartition("]")[2].partition(":")[2]
    return int(port) if port else 443


def _architecture(name: str) -> dict[str, str]:
    return {"kubernetes.io/arch": name} if name else {}


class Kserve(DeploymentKind):
    """A ServingRuntime that opens the bundle from its registry, and an InferenceService for it.

    The server pulls the image itself (`llmc serve oci://…`), which checks the signature. KServe's own `oci://` requires
    a model below /models in an image with a shell (KServe 0.15, "Modelcars"); a bundle's image has neither.
    """

    name = "kserve"
    takes = (
        "bundle", "bundle_image", "image", "namespace", "replicas", "max_replicas", "cpus", "trusted_keys",
        "api_key_secret",
    )  # fmt: skip
    needs = Kubernetes.needs
    templates: ClassVar[Mapping[str, str]] = {
        "serving-runtime.yaml": "kserve/serving-runtime", "inference-service.yaml": "kserve/inference-service",
    }  # fmt: skip

    def values(self, options: Options) -> dict[str, Any]:
        """Template variables of pods that pull the bundle."""
        return Kubernetes().values(replace(options, pull=True))
