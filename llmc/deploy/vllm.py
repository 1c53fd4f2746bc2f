"""`llmc deploy vllm`: a vLLM server with a plan of llmc's, and with a compile cache that llmc packed, in Kubernetes.

The plan is a configuration of `llmc plan tune` or `export`, or a bundle's own. An init container unpacks the cache;
without one the server compiles when it starts. What is rendered here follows the servers' documentation
(docs/servers.md, docs/foreign-caches.md), and was validated and not run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from llmc.deploy.base import Kind, Options
from llmc.deploy.kubernetes import PROBE_S
from llmc.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from llmc.buckets.servers.base import Server
    from llmc.buckets.servers.configuration import Configuration
    from llmc.compiler.targets.hosting import Hosting

LOAD_S = 600
"""For fetching and loading a checkpoint, which nothing here knows."""


@dataclass(frozen=True)
class Runs:
    """What a server runs on, as llmc names the device ("": it has to be said), and the variables that put its compile
    cache below /cache, which are those that `llmc cache unpack` reads."""

    device: str
    cache: Mapping[str, str] = field(default_factory=dict)


SERVERS = {
    "vllm": Runs("inductor", {"VLLM_CACHE_ROOT": "/cache/vllm"}),
    "vllm-gaudi": Runs("hpu", {"PT_HPU_RECIPE_CACHE_CONFIG": "/cache/recipes,false,8192"}),
    "vllm-neuron": Runs("neuron", {"VLLM_CACHE_ROOT": "/cache/vllm"}),
    "tpu-inference": Runs("", {"VLLM_XLA_CACHE_PATH": "/cache/jax"}),
}


class Vllm(Kind):
    """See the module's docstring."""

    name: ClassVar[str] = "vllm"
    takes: ClassVar[tuple[str, ...]] = (
        "bundle", "server", "configuration", "model", "image", "tool_image", "cache_image", "device", "namespace",
        "replicas", "port", "cpus", "trusted_keys", "api_key_secret",
    )  # fmt: skip
    needs: ClassVar[tuple[str, ...]] = ("server", "model", "image")
    templates: ClassVar[Mapping[str, str]] = {
        "deployment.yaml": "vllm/deployment", "service.yaml": "kubernetes/service",
        "kustomization.yaml": "vllm/kustomization",
    }  # fmt: skip

    def values(self, options: Options) -> dict[str, Any]:
        """Raises InputError and UnknownNameError for what cannot be planned or has no device."""
        from llmc.buckets.servers import create
        from llmc.buckets.servers.export import MOUNT, mounted

        if options.server not in SERVERS:
            raise UnknownNameError("vLLM server", options.server, SERVERS)
        server, runs = create(options.server), SERVERS[options.server]
        if options.cache_image is not None and not options.tool_image:
            raise InputError("a packed cache is unpacked by llmc: name an image with it with --tool-image")
        plan = _configuration(server, options)
        exported = server.export(plan.setup, plan.accepted(server).lists)
        environment, arguments = mounted(exported)
        seconds = server.graphs(plan.setup, plan.lists) * (server.cost.seconds or 0) + LOAD_S
        reference = options.cache_image
        hosting = _hosting(options, runs)
        return {
            "hosting": hosting, "variables": {**runs.cache, **hosting.environment, **environment},
            "arguments": [f"--port={options.port}", *arguments],
            "caches": runs.cache, "files": exported.files, "mount": MOUNT, "every": PROBE_S,
            "tries": math.ceil(2 * seconds / PROBE_S), "oci": str(reference or ""),
            "source": plan.name,
        }  # fmt: skip


def _configuration(server: Server, options: Options) -> Configuration:
    """The plan that was named, or the bundle's. Raises InputError without either."""
    from llmc.buckets.servers.configuration import Configuration, load, setup_for

    if options.configuration is not None:
        return load(server, str(options.configuration), {}, {})
    if options.bundle is None:
        raise InputError("llmc deploy vllm needs a plan: --configuration CONFIG (llmc plan tune), or --bundle BUNDLE")
    plan = options.bundle.plan
    setup = setup_for(server, plan.limits.to_dict(), {})
    return Configuration(str(options.bundle_path), setup, server.from_plan(setup, plan))


def _hosting(options: Options, runs: Runs) -> Hosting:
    from llmc.compiler.targets import open_target

    device = options.device or runs.device
    if not device:
        raise InputError(f"{options.server} runs on one of several devices: say which with --device, as in tpu:v5e-2x2")
    return open_target(device).hosting({})
