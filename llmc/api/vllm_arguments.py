"""vLLM's constructor arguments: those that llmc shares, renames, or ignores."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llmc.errors import InputError

ENGINE = (
    "prefill_budget", "prefix_slots", "enable_prefix_caching", "seed", "observer", "max_queued_requests",
    "speculative_config", "enforce_eager", "prefill", "warm_up",
)  # fmt: skip
"""Arguments of the engine. Arguments not listed in this module belong to `llmc.compile`."""

_COMPILES = ("plan", "cache_dir", "store", "report", "threads", "device", "task", "lora", "lora_modules")
_DTYPES = {"float32": "f32", "float": "f32", "bfloat16": "bf16", "float16": "f16", "half": "f16"}
_TASKS = {
    "embed": "embed",
    "classify": "score",
    "generate": "generate",
    "embedding": "embed",
    "auto": None,
    "none": None,
}
"""vLLM's names of tasks, from `task` of earlier versions and `convert` of later ones."""
_KV_CACHES = {"bfloat16": "bf16", "fp8_e4m3": "fp8"}

_WITHOUT_EFFECT = {
    "disable_log_stats": "there is no statistics log",
    "download_dir": "checkpoints are read where they are",
    "enable_chunked_prefill": "prompts are always chunked as the plan's buckets require",
    "gpu_memory_utilization": "the plan's limits size the cache; on devices that capture graphs, warm_up does",
    "load_format": "the format is read from the files",
    "override_neuron_config": "the plan defines what is compiled",
    "runner": "the task is read from the checkpoint's files, or given as task",
    "revision": "checkpoints are used as they are",
    "swap_space": "no sequence is swapped out",
    "tokenizer": "the tokenizer is the checkpoint's own",
    "tokenizer_mode": "the tokenizer is the checkpoint's own",
    "trust_remote_code": "no code of a checkpoint is run",
}
_OPTIONS = {"override_neuron_config": "override_neuron_config", "tensor_parallel_size": "tensor_parallel"}
"""vLLM's names of options that some devices declare, and llmc's names."""

_ONE = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def split(arguments: Mapping[str, Any], device: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the arguments of LLM() for a device into those of `llmc.compile` and those of the engine.

    Warns about arguments without effect. Also warns about more than one device unless `device` can shard graphs,
    because a bundle runs on the number of devices that it was compiled for. Raises InputError for an argument that
    neither vLLM nor llmc knows, naming the nearest.
    """
    compiled: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in ENGINE:
            engine[name] = value
        elif value and name in _OPTIONS and _takes(device, _OPTIONS[name]):
            compiled[_OPTIONS[name]] = json.dumps(value) if isinstance(value, dict) else value
        elif name in _WITHOUT_EFFECT:
            if value:
                _warn(f"{name} has no effect: {_WITHOUT_EFFECT[name]}")
        elif name in _ONE:
            if value not in (None, 1):
                _warn(f"{name}={value} has no effect: a bundle runs as it was compiled, by default on one device")
        elif name == "quantization":
            compiled["quantize"] = value
        elif name in ("task", "convert"):
            if _TASKS.get(value, value) is not None:
                compiled["task"] = _TASKS.get(value, value)
        elif name == "kv_cache_dtype":
            if value not in (None, "auto"):
                compiled[name] = _KV_CACHES.get(value, value)
        elif name == "dtype":
            if value not in (None, "auto"):
                compiled["dtype"] = _DTYPES.get(str(value).removeprefix("torch."), value)
        else:
            compiled[name] = value
    if compiled:
        _require_known(compiled)
    return compiled, engine


def _takes(device: str | None, option: str) -> bool:
    from llmc.compiler.targets import declared

    return device is not None and device.partition(":")[0] in declared()[option].devices


def _require_known(compiled: Mapping[str, Any]) -> None:
    from llmc.compiler.options import SHARED
    from llmc.compiler.pipeline.planning import PlanArguments
    from llmc.compiler.targets import declared

    known = {*SHARED, *declared(), *PlanArguments.__dataclass_fields__, *_COMPILES, *ENGINE}
    known = (known | {*_WITHOUT_EFFECT, *_ONE, "quantization", "convert"}) - {"model", "settings", "target"}
    for name in compiled:
        if name not in known:
            from difflib import get_close_matches

            nearest = get_close_matches(name, sorted(known), n=1, cutoff=0.0)[0]
            raise InputError(f"LLM() knows no argument {name!r}; the nearest it knows is {nearest!r}")


def _warn(text: str) -> None:
    import logging

    logging.getLogger("llmc").warning("%s", text)
