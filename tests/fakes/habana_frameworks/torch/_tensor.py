"""Tensors on the accelerator: CPU tensors inside, hpu:0 outside. All that is done with them passes through here."""

from __future__ import annotations

from typing import Any

import torch
from habana_frameworks.torch import _accelerator
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("hpu", 0)
CPU = torch.device("cpu")
COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


class HpuTensor(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> HpuTensor:
        built = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            layout=inner.layout, device=DEVICE, requires_grad=False,
        )  # fmt: skip
        built._inner = inner
        if not isinstance(inner, FakeTensor):
            _accelerator.accelerator().hold(built, inner.untyped_storage())
        return built

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: None, size: Any, stride: Any) -> HpuTensor:
        return HpuTensor(inner["_inner"])

    def __repr__(self) -> str:
        return f"HpuTensor({self._inner})"

    def copy_(self, src: torch.Tensor, non_blocking: bool = False) -> HpuTensor:
        """Directly: on the way there, torch asks for a device guard for hpu, which stock torch has not."""
        HpuTensor.__torch_dispatch__(torch.ops.aten.copy_.default, (), (self, src))
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if (simpler := func.decompose(*args, **kwargs)) is not NotImplemented:
            return simpler
        tracing = any(isinstance(getattr(leaf, "_inner", leaf), FakeTensor) for leaf in tree_leaves((args, kwargs)))
        if not tracing:
            _one_device(func, args, kwargs)
        out = func(*tree_map(_inside, args), **tree_map(_inside, kwargs))
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu":
            _accelerator.accelerator().mark_step()  # what the host reads has to be there
            return out
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], HpuTensor):
            _accelerator.accelerator().mark_step()
            return args[0]
        result = _wrapped(func, args, kwargs, out)
        if not tracing:
            _note(func, args, kwargs, result)
        return result


def _wrapped(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    if func._schema.is_mutable and func._schema.returns and isinstance(out, torch.Tensor):
        return kwargs["out"] if "out" in kwargs else args[0]
    return tree_map(lambda x: HpuTensor(x) if isinstance(x, torch.Tensor) else x, out)


def _inside(value: Any) -> Any:
    if isinstance(value, HpuTensor):
        return value._inner
    if isinstance(value, FakeTensor) and value.device.type == "hpu":  # made while tracing, by torch.arange and such
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    return CPU if isinstance(value, torch.device) and value.type == "hpu" else value


def _one_device(func: Any, args: Any, kwargs: Any) -> None:
    if func in COPIES:
        return
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, HpuTensor) and leaf.dim():
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, hpu:0 and "
                f"{leaf.device}! ({func})"
            )


def describe(value: Any) -> str:
    """What a graph depends on of an argument."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}{list(value.stride())}"
    return repr(value)


def _note(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Record an operator that ran on the accelerator."""
    accelerator = _accelerator.accelerator()
    if accelerator.capturing is not None:
        accelerator.capturing.append((func, args, kwargs, result))
    views = func.is_view or func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
    host = func is torch.ops.aten.copy_.default and not isinstance(args[1], HpuTensor)
    if not views and not host:
        accelerator.operator(f"{func} {tree_map(describe, args)} {tree_map(describe, kwargs)}")


def replay(recorded: list[Any]) -> None:
    """Run recorded operators again: they read and write the tensors that they had."""
    for func, args, kwargs, result in recorded:
        if func.is_view:
            continue
        out = func(*tree_map(_inside, args), **tree_map(_inside, kwargs))
        if not func._schema.is_mutable:
            for old, new in zip(tree_leaves(result), tree_leaves(out), strict=True):
                if isinstance(old, HpuTensor) and old._inner.untyped_storage()._cdata != new.untyped_storage()._cdata:
                    old._inner.copy_(new)


def _empty(size: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
           memory_format: Any = None) -> HpuTensor:  # fmt: skip
    return HpuTensor(torch.empty(size, dtype=dtype, device="cpu"))


def _empty_strided(size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None,
                   pin_memory: Any = None) -> HpuTensor:  # fmt: skip
    return HpuTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


_library = torch.library.Library("aten", "IMPL")
_library.impl("empty.memory_format", _empty, "HPU")
_library.impl("empty_strided", _empty_strided, "HPU")
