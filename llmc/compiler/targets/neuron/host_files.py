"""What a compile for neuron leaves beside its bundle, for those who serve with vLLM.

arguments, environment, config.yaml …    the plan as the server reads it (`llmc plan export`)
cpu-compile.sh                           vLLM Neuron's own compile for a chip that is not here, and its cache packed
serve.env                                a graph that was not compiled is an error of the server

VLLM_NEURON_FRAMEWORK chooses the server: none is vLLM Neuron, the plug-in of today; neuronx-distributed-inference is
its predecessor, which has no compile without a device. transformers-neuronx has no files here, and a warning says so.
The variables are those of Neuron SDK 2.33's documentation, "CPU Compilation".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmc.artifacts.log import logger
from llmc.buckets.plan import Plan
from llmc.compiler.targets.host_files import exported, rendered, server_files
from llmc.errors import InputError
from llmc.integrations import bucket_rules

SERVER, PREDECESSOR = "vllm-neuron", "nxd"
TEMPLATES = ("cpu-compile.sh",)
STRICT = "NEURON_LIBTORCH_DISABLE_GRAPH_CAPTURE_BACKEND=1\nVLLM_NEURON_DISABLE_WARMUP_COMPILE=1\n"


def host_files(folder: Path, plan: Plan, chip: str, framework: str | None) -> Mapping[str, str]:
    """Texts by file name, for files in `folder`."""
    if framework == "transformers-neuronx":
        logger().warning("VLLM_NEURON_FRAMEWORK=%s: nothing is left for it; it is no longer released", framework)
        return {}
    name = SERVER if framework is None else PREDECESSOR
    server = bucket_rules(name)
    length = plan.limits.max_model_len
    given = {"max_model_len": length, "max_num_seqs": plan.limits.max_num_seqs, "max_num_batched_tokens": length}
    try:
        limits = server.limits(given)
    except InputError as error:
        logger().warning("no bucket file for %s: %s", name, error)
        return {}
    found = exported(name, plan, limits)
    texts = dict(server_files(name, folder, found))
    if found is None or name == PREDECESSOR:
        return texts
    values = {"chip": chip, "arguments": repr(json.dumps(keywords(found.arguments)))}
    return {**texts, "serve.env": STRICT, **rendered("llmc.compiler.targets.neuron", TEMPLATES, values)}


def keywords(arguments: Sequence[str]) -> dict[str, object]:
    """A server's flags as the keywords that vllm.LLM takes for them."""
    found: dict[str, object] = {}
    for argument in arguments:
        flag, _, value = argument.partition(" ")
        name = flag.removeprefix("--").replace("-", "_")
        if not value:
            found[name.removeprefix("no_")] = not name.startswith("no_")
            continue
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found
