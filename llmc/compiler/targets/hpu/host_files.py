"""What a compile for hpu leaves beside its bundle, for a Gaudi host.

buckets.txt, environment, arguments, kubernetes-env.yaml   the plan as vllm-gaudi reads it (`llmc plan export`)
finish.sh, finish-job.yaml                                 finish the bundle there, and warm it up

A plan of which vllm-gaudi's rules leave nothing has the last two alone, and a warning says why. The resource
habana.ai/gaudi is that of Intel's device plugin (docs.habana.ai, Intel Gaudi Base Operator DaemonSets, 2026).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from llmc.artifacts.log import logger
from llmc.buckets.plan import Plan
from llmc.buckets.servers import create
from llmc.buckets.servers.base import Setup
from llmc.buckets.servers.export import texts_for
from llmc.buckets.servers.settings import complete
from llmc.errors import InputError

SERVER = "vllm-gaudi"
TEMPLATES = ("finish.sh", "finish-job.yaml")
LONGEST_NAME = 63
"""Characters of a name in Kubernetes (RFC 1123 label)."""


def host_files(folder: Path, bundle: Path, plan: Plan) -> Mapping[str, str]:
    """Texts by file name, for files in `folder`."""
    return {**_server_files(folder, plan), **_jobs(bundle)}


def _server_files(folder: Path, plan: Plan) -> Mapping[str, str]:
    """The plan in the server's form; none, and a warning, where its rules leave nothing of it."""
    server = create(SERVER)
    setup = Setup(plan.limits, complete(server.settings, {}))
    try:
        accepted = server.accept(setup, server.from_plan(setup, plan))
        return texts_for(folder, server.export(setup, accepted.lists), server.name)
    except InputError as error:
        logger().warning("no bucket file for %s: %s", SERVER, error)
        return {}


def _jobs(bundle: Path) -> Mapping[str, str]:
    place = bundle.absolute()
    label = re.sub(r"[^a-z0-9]+", "-", f"finish-{place.name}".lower()).strip("-")
    values = {
        "bundle": shlex.quote(str(place)),
        "mounted": json.dumps(f"/bundles/{place.name}"),
        "name": label[:LONGEST_NAME].rstrip("-"),
    }
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)  # noqa: S701
    templates = files("llmc.compiler.targets.hpu") / "templates"
    return {name: environment.from_string((templates / name).read_text()).render(values) for name in TEMPLATES}
