"""A step compiled by torch.compile, as one graph of fixed shapes."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any


def whole_graph(run: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`run`, a function, as one graph, compiled by its first call; `options` are torch.compile's.

    torch._dynamo keeps what it compiled with a function's code, at most 8 graphs for each, and tries them in turn. So
    each graph gets code of its own.
    """
    import torch

    assert isinstance(run, FunctionType)
    own = FunctionType(run.__code__.replace(), run.__globals__, run.__name__, run.__defaults__, run.__closure__)
    made: Callable[..., Any] = torch.compile(own, fullgraph=True, dynamic=False, **options)
    return made
