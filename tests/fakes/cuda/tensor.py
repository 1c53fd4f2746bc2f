"""Tensors on the GPU: CPU tensors inside, cuda:0 outside. All that is done with them passes through here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tests.fakes.cuda import state

DEVICE, CPU = torch.device("cuda", 0), torch.device("cpu")
_aten = torch.ops.aten
COPIES = (_aten.copy_.default, _aten._to_copy.default)
WAITS = (_aten._local_scalar_dense.default, _aten.equal.default, _aten.nonzero.default, _aten.is_nonzero.default)
"""Operators whose result the host, or the size of whose result, depends on what the GPU computed."""


class CudaTensor(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> CudaTensor:
        built = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            layout=inner.layout, device=DEVICE, requires_grad=False,
        )  # fmt: skip
        built._inner = inner
        if not isinstance(inner, FakeTensor):
            built._gpu = state.gpu()
            built._gpu.hold(built, inner.untyped_storage())
        return built

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: None, size: Any, stride: Any) -> CudaTensor:
        return CudaTensor(inner["_inner"])

    def __repr__(self) -> str:
        return f"CudaTensor({self._inner})"

    def copy_(self, src: torch.Tensor, non_blocking: bool = False) -> CudaTensor:
        """Directly: on the way there, torch asks for a device guard for cuda, which a CPU build has not."""
        CudaTensor.__torch_dispatch__(_aten.copy_.default, (), (self, src, non_blocking))
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        gpu = state.gpu()
        with gpu.one_kernel():
            simpler = func.decompose(*args, **kwargs)
        if simpler is not NotImplemented:
            return simpler
        tensors = list(tensors_in((args, list(kwargs.values()))))
        if any(isinstance(getattr(leaf, "_inner", leaf), FakeTensor) for leaf in tensors):
            return _wrapped(func, args, kwargs, func(*inside(args), **inside(kwargs)))
        gpu.check()
        _one_device(func, tensors)
        to_host = func in COPIES and _to_host(func, args, kwargs)
        if func in WAITS or (func in COPIES and _waits(func, args, kwargs, to_host)):
            gpu.wait()
        out = func(*inside(args), **inside(kwargs))
        if to_host or func in WAITS[:2] or func is WAITS[3]:
            return args[0] if func is _aten.copy_.default else out
        result = _wrapped(func, args, kwargs, out)
        if not func.is_view:
            gpu.count_kernel()
        if gpu.capturing is not None:
            gpu.capturing.record(func, args, kwargs, result)
        return result


def _wrapped(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    if func._schema.is_mutable and func._schema.returns and isinstance(out, torch.Tensor):
        return kwargs["out"] if "out" in kwargs else args[0]
    return _each(out, lambda x: CudaTensor(x) if isinstance(x, torch.Tensor) else x)


def inside(value: Any) -> Any:
    return _each(value, _inner)


def _inner(value: Any) -> Any:
    if isinstance(value, PinnedTensor):
        return value.as_subclass(torch.Tensor)
    if isinstance(value, CudaTensor):
        return value._inner
    if isinstance(value, FakeTensor) and value.device.type == "cuda":  # made while tracing, by torch.arange and such
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    return CPU if isinstance(value, torch.device) and value.type == "cuda" else value


def _each(value: Any, of: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {name: _each(one, of) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_each(one, of) for one in value)
    return of(value)


def tensors_in(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)


def _to_host(func: Any, args: Any, kwargs: Any) -> bool:
    if func is _aten.copy_.default:
        return not isinstance(args[0], CudaTensor)
    return kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"


def _waits(func: Any, args: Any, kwargs: Any, to_host: bool) -> bool:
    """Copies between host and GPU wait, unless they are asked not to and the host's side is pinned
    (aten/src/ATen/native/cuda/Copy.cu)."""
    if func is not _aten.copy_.default:
        return to_host
    host = args[0] if to_host else args[1]
    requested = bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking"))
    return not isinstance(host, CudaTensor) and not (requested and isinstance(host, PinnedTensor))


def _one_device(func: Any, tensors: list[torch.Tensor]) -> None:
    if func in COPIES:
        return
    for leaf in tensors:
        if not isinstance(leaf, CudaTensor) and leaf.dim():
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
                f"{leaf.device}! ({func})"
            )


# the host's side

_empty_of_torch = torch.empty


class PinnedTensor(torch.Tensor):
    """Pinned memory of the host, and views of it."""

    def copy_(self, src: torch.Tensor, non_blocking: bool = False) -> PinnedTensor:
        """Directly, as CudaTensor.copy_."""
        if not isinstance(src, CudaTensor):
            return super().copy_(src, non_blocking)
        CudaTensor.__torch_dispatch__(_aten.copy_.default, (), (self, src, non_blocking))
        return self


def empty_with_pinned(*size: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
    """torch.empty, which a build without CUDA refuses pinned memory."""
    built = _empty_of_torch(*size, **kwargs)
    return built.as_subclass(PinnedTensor) if pin_memory else built


# the device's factories


def _empty(size: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
           memory_format: Any = None) -> CudaTensor:  # fmt: skip
    state.gpu().check()
    return CudaTensor(_empty_of_torch(size, dtype=dtype, device="cpu"))


def _empty_strided(size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None,
                   pin_memory: Any = None) -> CudaTensor:  # fmt: skip
    state.gpu().check()
    return CudaTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


_library = torch.library.Library("aten", "IMPL")
_library.impl("empty.memory_format", _empty, "CUDA")
_library.impl("empty_strided", _empty_strided, "CUDA")

NAMES: dict[str, Any] = {
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_name": lambda device=None: "NVIDIA H100 80GB HBM3",
    "get_device_capability": lambda device=None: (9, 0),
    "get_rng_state": lambda device="cuda": _empty_of_torch(16, dtype=torch.uint8),
    "set_rng_state": lambda new_state, device="cuda": None,
    "synchronize": lambda device=None: state.gpu().wait(),
    "mem_get_info": lambda device=None: (state.gpu().allocator.available, state.gpu().allocator.total),
}
