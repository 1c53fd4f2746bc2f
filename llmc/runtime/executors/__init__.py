"""Executors: one file per runtime that replays executables. Each is imported when a bundle names it.

Other packages add theirs in the entry-point group "llmc.executors" (registry.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmc.errors import ArtifactError, DeviceError, UnknownNameError
from llmc.platforms import not_installed
from llmc.registry import Registry

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.base import Executor

EXECUTORS = Registry(
    "executor",
    "llmc.executors",
    {
        "onnxruntime": "llmc.runtime.executors.onnxruntime.executor:OnnxRuntimeExecutor",
        "onnxruntime-llmc": "llmc.runtime.executors.onnxruntime.executor:KernelExecutor",
        "torch": "llmc.runtime.executors.torch.executor:TorchExecutor",
        "hpu": "llmc.runtime.executors.hpu.executor:HpuExecutor",
        "inductor": "llmc.runtime.executors.inductor.executor:InductorExecutor",
        "xla": "llmc.runtime.executors.xla.executor:XlaExecutor",
        "xla-cuda": "llmc.runtime.executors.xla.executor:CudaExecutor",
        "neuron": "llmc.runtime.executors.neuron.executor:NeuronExecutor",
        "openvino": "llmc.runtime.executors.openvino.executor:OpenVinoExecutor",
        "openvino-static": "llmc.runtime.executors.openvino.static_executor:OpenVinoStaticExecutor",
        "openvino-gpu": "llmc.runtime.executors.openvino.static_executor:OpenVinoGpuExecutor",
        "openvino-npu": "llmc.runtime.executors.openvino.static_executor:OpenVinoNpuExecutor",
        "lpu": "llmc.runtime.executors.lpu.executor:LpuExecutor",
        "fake": "llmc.runtime.executors.fake.executor:FakeExecutor",
    },
    untold=("fake",),
)


def executor_class(name: str) -> type[Executor]:
    """The executor class called `name`. Raises UnknownNameError, and DeviceError if its package is not installed."""
    found: type[Executor] = installed(EXECUTORS, name)
    return found


def installed(registry: Registry, name: str) -> Any:
    """The entry `name` of a registry. Raises UnknownNameError, and DeviceError if its package is not installed."""
    try:
        return registry.get(name)
    except ModuleNotFoundError as error:
        if (missing := not_installed(error)) is None:
            raise
        raise missing from error


def executor_module(name: str) -> str:
    """The module of that class; raises UnknownNameError listing the known names."""
    return EXECUTORS.module(name)


def open_executor(bundle: Bundle, slots: int | None = None, threads: int | None = None) -> Executor:
    """Open a new executor of `slots` sequences (default: the plan's max_num_seqs) of up to max_model_len tokens.

    Raises ArtifactError or DeviceError if this host cannot run the bundle.
    """
    if bundle.manifest.is_unbound:
        raise ArtifactError(
            f"{bundle.path}: compiled from a configuration alone, it holds no weights; name them when it is opened: "
            "--weights MODEL, or LLM(model=…, weights=…)"
        )
    limits = bundle.plan.limits
    slots = slots or max(limits.max_num_seqs, *(b.batch for b in bundle.plan.decode))
    capacity = max(limits.max_model_len, *(b.context + b.query for b in bundle.plan.buckets))
    return open_sized(bundle, slots, capacity, threads or bundle.settings.threads)


def open_sized(bundle: Bundle, slots: int, capacity: int, threads: int) -> Executor:
    """Open a new executor with `slots` slots of `capacity` tokens each. Raises what `open_executor` raises."""
    from llmc.runtime.executors.base import EXECUTABLES
    from llmc.runtime.executors.compatibility import require_built_here

    try:
        cls = executor_class(bundle.manifest.executor)
    except UnknownNameError as e:
        raise ArtifactError(f"{bundle.path}: {e}; it was compiled by llmc {bundle.manifest.llmc}, install that") from e
    require_built_here(bundle, cls.description.host())
    cls.check(bundle)
    for name, content in cls.description.opens.items():
        if content == "code" and (name == EXECUTABLES or name in bundle.manifest.files):
            bundle.files.require_native(name)
    bundle.warn_if_exposed()
    try:
        return cls(bundle, slots, capacity, threads)
    except (MemoryError, OverflowError) as e:
        raise DeviceError(
            f"{bundle.path}: this host has no memory for {slots} sequences of {capacity} tokens of its model "
            f"({str(e) or type(e).__name__}); compile for fewer or shorter ones: {bundle.recompile_hint}"
        ) from e
