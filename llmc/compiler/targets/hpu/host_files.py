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
from pathlib import Path

from llmc.buckets.plan import Plan
from llmc.compiler.targets.host_files import exported, rendered, server_files

SERVER = "vllm-gaudi"
TEMPLATES = ("finish.sh", "finish-job.yaml")
LONGEST_NAME = 63
"""Characters of a name in Kubernetes (RFC 1123 label)."""


def host_files(folder: Path, bundle: Path, plan: Plan) -> Mapping[str, str]:
    """Texts by file name, for files in `folder`."""
    return {**server_files(SERVER, folder, exported(SERVER, plan)), **_jobs(bundle)}


def _jobs(bundle: Path) -> Mapping[str, str]:
    place = bundle.absolute()
    label = re.sub(r"[^a-z0-9]+", "-", f"finish-{place.name}".lower()).strip("-")
    values = {
        "bundle": shlex.quote(str(place)),
        "mounted": json.dumps(f"/bundles/{place.name}"),
        "name": label[:LONGEST_NAME].rstrip("-"),
    }
    return rendered("llmc.compiler.targets.hpu", TEMPLATES, values)
