"""--override-neuron-config: the supported members of NxD Inference's neuron_config.

    enable_bucketing             false: one prefill bucket of one whole prompt, and one decode bucket of all sequences
    on_device_sampling_config    {"global_topk": N}: how many of the largest logits are found on the device, 256 by
                                 default; null: none, all logits are copied to the host
    tp_degree                    as --tensor-parallel
    logical_nc_config            NeuronCores of a logical one, on trn2
    torch_dtype                  "bfloat16" or "float32", as --dtype

Any other member is refused by name. Sources: vLLM user guide for NxD Inference (Neuron SDK 2.23);
neuronx-distributed-inference 11b342a, models/config.py (NeuronConfig, OnDeviceSamplingConfig).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmc.compiler.options import MAX_TOP_K, Option
from llmc.errors import InputError
from llmc.strict_json import loads_object

NEURON_CONFIG: Option[str] = Option(
    "override_neuron_config", str, "",
    'Members of NxD Inference\'s neuron_config, as in {"enable_bucketing": false}.', metavar="JSON",
    shapes_executable=False,
)  # fmt: skip

_DTYPES = {"bfloat16": "bf16", "float32": "f32"}
_ELSEWHERE = {
    "batch_size": "--max-num-seqs", "max_batch_size": "--max-num-seqs", "seq_len": "--max-model-len",
    "max_context_length": "--max-prompt-len", "context_encoding_buckets": "--from-file",
    "token_generation_buckets": "--from-file", "quantized": "--quantize",
}  # fmt: skip
"""Members that are llmc flags."""


@dataclass(frozen=True)
class NeuronConfig:
    """The requested members; None for each one that is absent."""

    bucketing: bool = True
    top_k: int | None = None
    tensor_parallel: int | None = None
    lnc: int | None = None
    dtype: str | None = None

    @classmethod
    def parse(cls, text: str) -> NeuronConfig:
        """Parse the flag's text, "" for none. Raises InputError that names an unusable member."""
        if not text:
            return cls()
        try:
            found = loads_object(text.encode())
        except ValueError as e:
            raise _wrong(f"is not a JSON object ({e})") from e
        known = {"enable_bucketing", "on_device_sampling_config", "tp_degree", "logical_nc_config", "torch_dtype"}
        for name in found:
            if name in _ELSEWHERE:
                raise _wrong(f"{name} is {_ELSEWHERE[name]} here; give that")
            if name not in known:
                raise _wrong(f"{name} is not supported here; known: {', '.join(sorted(known))}")
        bucketing = found.get("enable_bucketing", True)
        if not isinstance(bucketing, bool):
            raise _wrong("enable_bucketing must be true or false")
        dtype = found.get("torch_dtype")
        if dtype is not None and dtype not in _DTYPES:
            raise _wrong(f"torch_dtype must be one of {', '.join(_DTYPES)}")
        return cls(
            bucketing, _top_k(found), _positive(found, "tp_degree"), _positive(found, "logical_nc_config"),
            None if dtype is None else _DTYPES[dtype],
        )  # fmt: skip


def canonical(text: str) -> str:
    """Normalise spaces and member order of a valid configuration."""
    return json.dumps(loads_object(text.encode()), sort_keys=True)


def _top_k(found: Mapping[str, Any]) -> int | None:
    if "on_device_sampling_config" not in found:
        return None
    requested = found["on_device_sampling_config"]
    if requested is None:
        return 0
    if not isinstance(requested, dict):
        raise _wrong("on_device_sampling_config must be an object, or null")
    number = requested.get("global_topk", MAX_TOP_K)
    if type(number) is not int or not 1 <= number <= MAX_TOP_K:
        raise _wrong(f"on_device_sampling_config.global_topk {json.dumps(number)} must be in 1 … {MAX_TOP_K}")
    return number


def _positive(found: Mapping[str, Any], name: str) -> int | None:
    value = found.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise _wrong(f"{name} must be a positive number")
    return value


def _wrong(what: str) -> InputError:
    return InputError(f"{NEURON_CONFIG.flag}: {what}")
