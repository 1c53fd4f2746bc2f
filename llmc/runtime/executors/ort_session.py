"""Opening ONNX Runtime sessions: options, and the thread pool that sessions of one process may share.

A process that opens many executables gives them one pool and one arena, or each would keep its own. ONNX Runtime takes
that decision for the whole process and for good: once there is a shared pool, every session must use it.
"""

from __future__ import annotations

import threading
from typing import Any

import onnxruntime as ort

_lock = threading.Lock()
_shared_threads: int | None = None


def share_pool(threads: int) -> None:
    """Let all sessions opened from now on share a pool of `threads`; the first call's number holds."""
    global _shared_threads  # noqa: PLW0603
    with _lock:
        if _shared_threads is not None:
            return
        ort.set_global_thread_pool_sizes(threads, 1)
        info = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
        ort.create_and_register_allocator(info, ort.OrtArenaCfg({"arena_extend_strategy": 1}))
        _shared_threads = threads


def open_session(model: str | bytes, threads: int | None = None, **entries: str) -> Any:
    """A CPU session over a model's path or bytes, its graph left as it is: what compiling decided stays decided.

    `threads` None is ONNX Runtime's own choice; `entries` are session configuration entries, with "__" for ".". Raises
    whatever ONNX Runtime raises.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if _shared_threads is not None:
        options.use_per_session_threads = False
        options.add_session_config_entry("session.use_env_allocators", "1")
    elif threads is not None:
        options.intra_op_num_threads = threads
    saved = entries.pop("optimized_model", None)
    if saved is not None:
        options.optimized_model_filepath = saved
    for name, value in entries.items():
        options.add_session_config_entry(name.replace("__", "."), value)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
