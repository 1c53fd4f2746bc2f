"""`llmc deploy vllm`: a vLLM server with a plan and compile cache of llmc, in Kubernetes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from llmc.compiler.targets import open_target
from llmc.deploy.base import DeploymentKind, Options
from llmc.deploy.kubernetes import PROBE_S
from llmc.errors import InputError, UnknownNameError
from llmc.integrations import bucket_rules, integrations
from llmc.integrations.base import BucketRules
from llmc.integrations.configuration import MOUNT, Configuration, load, mounted, setup_for

LOAD_S = 600
"""Assumed seconds to fetch and load a checkpoint."""


class VllmDeployment(DeploymentKind):
    """A vLLM server in Kubernetes with a plan of llmc and a compile cache that llmc packed.

    The plan is a configuration of `llmc plan tune` or `export`, or a bundle's own. An init container unpacks the cache;
    without one the server compiles when it starts. The files follow the servers' documentation (docs/servers.md); they
    were validated but not run.
    """

    name = "vllm"
    takes = (
        "bundle", "server", "configuration", "model", "image", "tool_image", "cache_image", "device", "namespace",
        "replicas", "port", "cpus", "trusted_keys", "api_key_secret",
    )  # fmt: skip
    needs = ("server", "model", "image")
    templates: ClassVar[Mapping[str, str]] = {
        "deployment.yaml": "vllm/deploy/deployment", "service.yaml": "kubernetes/service",
        "kustomization.yaml": "vllm/deploy/kustomization",
    }  # fmt: skip

    def values(self, options: Options) -> dict[str, Any]:
        """Template variables. Raises InputError and UnknownNameError for an unusable plan or a missing device."""
        deployments = {name: one.deployment for name, one in integrations().items() if one.deployment is not None}
        if options.server not in deployments:
            raise UnknownNameError("vLLM server", options.server, deployments)
        server, deployment = bucket_rules(options.server), deployments[options.server]
        if options.cache_image is not None and not options.tool_image:
            raise InputError("--cache-image needs llmc to unpack it: name an image that has llmc with --tool-image")
        plan = _configuration(server, options)
        exported = server.export(plan.setup, plan.accepted(server).lists)
        environment, arguments = mounted(exported)
        seconds = server.graphs(plan.setup, plan.lists) * (server.cost.seconds or 0) + LOAD_S
        reference = options.cache_image
        device = options.device or deployment.device
        if not device:
            raise InputError(f"{options.server} runs on several devices: choose one with --device, such as tpu:v5e-2x2")
        hosting = open_target(device).hosting({})
        return {
            "hosting": hosting, "variables": {**deployment.cache, **hosting.environment, **environment},
            "arguments": [f"--port={options.port}", *arguments],
            "caches": deployment.cache, "files": exported.files, "mount": MOUNT, "every": PROBE_S,
            "tries": math.ceil(2 * seconds / PROBE_S), "oci": str(reference or ""),
            "source": plan.name,
        }  # fmt: skip


def _configuration(server: BucketRules, options: Options) -> Configuration:
    if options.configuration is not None:
        return load(server, str(options.configuration), {}, {})
    if options.bundle is None:
        raise InputError("llmc deploy vllm needs a plan: --configuration CONFIG (llmc plan tune), or --bundle BUNDLE")
    plan = options.bundle.plan
    setup = setup_for(server, plan.limits.to_dict(), {})
    return Configuration(str(options.bundle_path), setup, server.from_plan(setup, plan))
