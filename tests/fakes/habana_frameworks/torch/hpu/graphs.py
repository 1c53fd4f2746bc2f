"""HPU graphs: a capture records the operators that run, a replay runs them again on the tensors that they had."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from habana_frameworks.torch import _accelerator, _tensor
from habana_frameworks.torch.utils.internal import is_lazy
from torch.utils._pytree import tree_leaves


class HPUGraph:
    def __init__(self) -> None:
        self._recorded: list[Any] | None = None
        self._inputs: list[torch.Tensor] = []

    def capture_begin(self, dry_run: bool = False) -> None:
        accelerator = _accelerator.accelerator()
        if not is_lazy():
            raise RuntimeError("HPU graphs are captured in lazy mode only (PT_HPU_LAZY_MODE=1)")
        if accelerator.capturing is not None:
            raise RuntimeError("a capture is under way already")
        accelerator.mark_step()
        accelerator.capturing = []

    def capture_end(self) -> None:
        accelerator = _accelerator.accelerator()
        self._recorded, accelerator.capturing = accelerator.capturing, None
        text = "\n".join(f"{func} {[_tensor.describe(a) for a in args]}" for func, args, _, _ in self._recorded or ())
        accelerator.compile(f"captured {text}")

    def mark_user_inputs(self, static_tlist: list[torch.Tensor]) -> None:
        self._inputs = list(static_tlist)

    def mark_user_outputs(self, static_tlist: list[torch.Tensor]) -> None:
        """Nothing is freed here, so that there is nothing to keep."""

    def replay(self, asynchronous: bool = False) -> None:
        if self._recorded is None:
            raise RuntimeError("nothing was captured")
        _tensor.replay(self._recorded)

    def replayV3(self, tlistI: list[torch.Tensor], asynchronous: bool = False) -> None:
        for static, given in zip(self._inputs, tlistI, strict=True):
            if static is not given:
                static._inner.copy_(given._inner)
        self.replay(asynchronous)

    def reset(self) -> None:
        self._recorded, self._inputs = None, []


class graph:
    def __init__(self, hpu_graph: HPUGraph, stream: Any = None, dry_run: bool = False) -> None:
        self.hpu_graph, self.dry_run = hpu_graph, dry_run

    def __enter__(self) -> None:
        self.hpu_graph.capture_begin(self.dry_run)

    def __exit__(self, *exc: object) -> None:
        self.hpu_graph.capture_end()


def wrap_in_hpu_graph(
    module: torch.nn.Module, asynchronous: bool = False, disable_tensor_cache: bool = False, dry_run: bool = False,
    max_graphs: int | None = None,
) -> torch.nn.Module:  # fmt: skip
    """Replace `forward`: the first call of each shape captures, later ones replay. `bypass_hpu_graphs=True` does
    neither. As in the bridge, an exception leaves the capture open."""
    cache: dict[Any, tuple[HPUGraph, Any]] = {}
    original: Callable[..., Any] = module.forward

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if kwargs.pop("bypass_hpu_graphs", False):
            return original(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        key = str([_tensor.describe(leaf) for leaf in tree_leaves((args, kwargs))])
        if key not in cache:
            if max_graphs is not None and len(cache) == max_graphs:
                return original(*args, **kwargs)
            built = HPUGraph()
            built.capture_begin(dry_run=disable_tensor_cache or dry_run)
            built.mark_user_inputs(inputs)
            outputs = original(*args, **kwargs)
            built.capture_end()
            cache[key] = built, outputs
            return outputs
        built, outputs = cache[key]
        built.replayV3(inputs, asynchronous)
        return outputs

    module.forward = forward
    module.clear_cache = cache.clear
    return module
