"""Quantized Hugging Face folders, read by the method that `quantization_config` names. A method is a module of this
package (base.py has the contract) and an entry of METHODS."""

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
_ANOTHER = "use the unquantized checkpoint, and let `llmc compile --quantize` quantize it"
_ADVICE = {
    "bitsandbytes": f"{_ANOTHER}; or write one on a machine with a GPU: `m = AutoModelForCausalLM.from_pretrained(…); "
    "m.dequantize().save_pretrained(…)` (transformers)",
}  # fmt: skip
"""Methods that are not read → advice for such a checkpoint, if it differs from _ANOTHER."""


def is_read(stated: Any) -> bool:
    """Whether the method of a quantization_config is supported."""
    return isinstance(stated, Mapping) and str(stated.get("quant_method")) in METHODS


def in_models_order(tensors: Mapping[str, QuantisedTensor], turned: frozenset[str]) -> Mapping[str, QuantisedTensor]:
    """The same tensors, transposed for modules whose weights are [in, out] (last name part in `turned`)."""
    from llmc.compiler.checkpoint.quantised.groups import GroupedTensor, TurnedTensor

    def of(name: str, tensor: QuantisedTensor) -> QuantisedTensor:
        last = name.removesuffix(".weight").rpartition(".")[2]
        return TurnedTensor(tensor) if last in turned and isinstance(tensor, GroupedTensor) else tensor

    return {name: of(name, tensor) for name, tensor in tensors.items()}


def read_quantised(config: Mapping[str, Any], stored: StoredTensors) -> Reading:
    """Read a folder's quantized tensors by config.json as stored; empty without a quantization_config. Raises
    CheckpointError; for an unknown method it lists the known ones."""
    text = config.get("text_config")
    stated = config.get(STATED) or (text.get(STATED) if isinstance(text, Mapping) else None)
    if not stated:
        return Reading({})
    if not is_read(stated):
        method = str(stated.get("quant_method") if isinstance(stated, Mapping) else stated)
        raise stored.error(
            f"quantization_config: quant_method {method!r:.60} is not supported; llmc reads "
            f"{', '.join(sorted(METHODS))}: {_ADVICE.get(method, _ANOTHER)}"
        )
    module = import_module(f"llmc.compiler.checkpoint.quantised.{METHODS[stated['quant_method']]}")
    method_read: Method = module.read
    return method_read(stated, stored)
