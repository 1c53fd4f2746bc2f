"""The backend of torch.compile: one compilation for each graph that torch._dynamo hands over."""

from __future__ import annotations

from typing import Any

import torch
from habana_frameworks.torch import _accelerator
from habana_frameworks.torch._tensor import HpuTensor, describe
from torch._dynamo.backends.registry import register_backend
from torch.utils._pytree import tree_map


@register_backend
def hpu_backend(graph_module: Any, example_inputs: list[Any], **kwargs: Any) -> Any:
    options = kwargs.get("options") or {}
    if unknown := set(options) - {"force_static_compile", "keep_input_mutations", "use_eager_fallback"}:
        raise RuntimeError(f"Unexpected optimization option {sorted(unknown)}")
    text = f"{graph_module.code} {[describe(i) for i in example_inputs]}"
    output = next(node for node in graph_module.graph.nodes if node.op == "output")

    def run(*args: Any) -> Any:
        accelerator = _accelerator.accelerator()
        accelerator.compile(text)
        if accelerator.compile_only:
            return tree_map(lambda node: _garbage(node.meta["example_value"]), output.args[0])
        accelerator.inside_graph += 1
        try:
            return graph_module.forward(*args)
        finally:
            accelerator.inside_graph -= 1

    return run


def _garbage(value: Any) -> Any:
    """What nobody computed."""
    built = torch.empty(value.shape, dtype=value.dtype)
    built.fill_(float("nan") if built.is_floating_point() else torch.iinfo(built.dtype).min)
    return HpuTensor(built)
