"""`llmc deploy kserve`: a ServingRuntime that opens the bundle from its registry, and an InferenceService on it.

The server pulls the image itself (`llmc serve oci://…`), which checks the signature: KServe's own `oci://` wants a
model below /models of an image that has a shell (KServe 0.15, "Modelcars"), and a bundle's image has neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from llmc.deploy.base import Kind, Options
from llmc.deploy.kubernetes import Kubernetes


class Kserve(Kind):
    """See the module's docstring."""

    name: ClassVar[str] = "kserve"
    takes: ClassVar[tuple[str, ...]] = (
        "bundle", "bundle_image", "image", "namespace", "replicas", "max_replicas", "cpus", "trusted_keys",
        "api_key_secret",
    )  # fmt: skip
    needs: ClassVar[tuple[str, ...]] = Kubernetes.needs
    templates: ClassVar[Mapping[str, str]] = {
        "serving-runtime.yaml": "kserve/serving-runtime", "inference-service.yaml": "kserve/inference-service",
    }  # fmt: skip

    def values(self, options: Options) -> dict[str, Any]:
        """As of pods that pull the bundle."""
        return Kubernetes().values(replace(options, pull=True))
