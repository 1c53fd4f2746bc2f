"""Quantised Hugging Face folders: what their `quantization_config` says of how tensors are stored, by its method.

A method is a module of this package (base.py has the contract) and a line of METHODS.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from llmc.compiler.checkpoint.quantised.base import Method, QuantisedTensor, Reading, StoredTensors

STATED = "quantization_config"
METHODS = {
    "awq": "awq", "compressed-tensors": "compressed_tensors", "fp8": "fp8", "gptq": "gptq", "mxfp4": "mxfp4",
}  # fmt: skip
"""`quant_method` → the module that reads it."""
_ANOTHER = "take the unquantised checkpoint, and let `llmc compile --quantize` quantise it"
_ADVICE = {
    "bitsandbytes": f"{_ANOTHER}; or write one where a GPU is: `m = AutoModelForCausalLM.from_pretrained(…); "
    "m.dequantize().save_pretrained(…)` (transformers)",
}  # fmt: skip
"""Methods that are not read → what can be done with such a checkpoint, where that is more than _ANOTHER."""


def is_read(stated: Any) -> bool:
    """Whether a quantization_config is of a method that is read."""
    return isinstance(stated, Mapping) and str(stated.get("quant_method")) in METHODS


def in_models_order(tensors: Mapping[str, QuantisedTensor], turned: frozenset[str]) -> Mapping[str, QuantisedTensor]:
    """The same, those of modules whose names end in a part of `turned` [in, out]."""
    from llmc.compiler.checkpoint.quantised.groups import GroupedTensor, TurnedTensor

    def of(name: str, tensor: QuantisedTensor) -> QuantisedTensor:
        last = name.removesuffix(".weight").rpartition(".")[2]
        return TurnedTensor(tensor) if last in turned and isinstance(tensor, GroupedTensor) else tensor

    return {name: of(name, tensor) for name, tensor in tensors.items()}


def read_quantised(config: Mapping[str, Any], stored: StoredTensors) -> Reading:
    """What the folder's tensors stand for, by config.json as it is stored; all as it is where that says nothing.

    Raises CheckpointError, for an unknown method with those that are known.
    """
    text = config.get("text_config")
    stated = config.get(STATED) or (text.get(STATED) if isinstance(text, Mapping) else None)
    if not stated:
        return Reading({})
    if not is_read(stated):
        method = str(stated.get("quant_method") if isinstance(stated, Mapping) else stated)
        raise stored.error(
            f"quantization_config: quant_method {method!r:.60} is not read; llmc reads {', '.join(sorted(METHODS))}: "
            f"{_ADVICE.get(method, _ANOTHER)}"
        )
    module = import_module(f"llmc.compiler.checkpoint.quantised.{METHODS[stated['quant_method']]}")
    method_read: Method = module.read
    return method_read(stated, stored)
