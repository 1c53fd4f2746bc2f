"""Opens ONNX Runtime sessions: options, thread pool, and the one arena that all sessions of a process share.

With its own pool, each open session keeps a spinning thread. One shared pool was as fast with one session, and twice as
fast while another program kept a core busy (benchmarks/RESULTS.md). llmc's kernels have their own thread team (`Team`),
which a spinning pool would disturb. If kernels are opened first, the process's sessions have their own pools that do
not spin. ONNX Runtime fixes this choice for the whole process.
"""

from __future__ import annotations

import _ctypes
import ctypes
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import onnxruntime as ort

from llmc.runtime.executors.compilations import CallsMonitor
from llmc.settings import Settings

_lock = threading.Lock()
_shares_pool: bool | None = None
_teams_lock = threading.Lock()
_users: Counter[int] = Counter()
"""Users of each library's team, by library handle; links to one file share a handle."""


def open_session(
    model: str | bytes,
    threads: int | None = None,
    saved_as: str | None = None,
    library: str | None = None,
    **entries: str,
) -> Any:
    """A CPU session over a model's path or bytes. The graph is not optimised again.

    `threads` sizes the pool; with a shared pool only the process's first call counts. `saved_as` is a path to which
    ONNX Runtime writes the model. `library` is a path of additional operators. `entries` are session configuration
    entries, with "__" for ".". Raises ONNX Runtime's errors.
    """
    threads = threads or Settings.from_environment().threads
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.use_per_session_threads = not _shares(threads, library is None)
    if options.use_per_session_threads:
        options.intra_op_num_threads = threads
    options.add_session_config_entry("session.use_env_allocators", "1")
    if saved_as is not None:
        options.optimized_model_filepath = saved_as
    if library is not None:
        options.register_custom_ops_library(library)
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.enable_mem_pattern = False  # it would keep a plan for each number of tokens ever used in a step
    for name, value in entries.items():
        options.add_session_config_entry(name.replace("__", "."), value)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def session_monitor() -> CallsMonitor:
    """A monitor of every session created in the process."""
    return CallsMonitor("ONNX Runtime sessions", ort.InferenceSession, {"__init__": _session_name})


def _session_name(model: Any, *_: Any, **__: Any) -> str:
    return f"a model of {len(model)} bytes" if isinstance(model, bytes) else Path(model).name


def _shares(threads: int, wants: bool) -> bool:
    """Whether the process's sessions share a pool, as the first one chose."""
    global _shares_pool  # noqa: PLW0603
    with _lock:
        if _shares_pool is None:
            _shares_pool = wants
            if wants:
                ort.set_global_thread_pool_sizes(threads, 1)
            info = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
            ort.disable_telemetry_events()  # for programs that imported onnxruntime before llmc.quiet
            ort.create_and_register_allocator(info, ort.OrtArenaCfg({"arena_extend_strategy": 1}))
        return _shares_pool


class Team:
    """One user's share of the thread team of the llmc kernel library at `path`, which ONNX Runtime has opened.

    The team (kernels/source/team.c) replaces ONNX Runtime's pool. It has the `threads` of its latest user, including
    the calling thread, and ends with its last user. Concurrent sessions take turns: a job that finds the team busy runs
    on ONNX Runtime's pool.
    """

    def __init__(self, path: str, threads: int) -> None:
        self._library = ctypes.CDLL(path)
        with _teams_lock:
            _users[self._library._handle] += 1
            self._set_threads(threads)

    def close(self) -> None:
        handle = self._library._handle
        with _teams_lock:
            _users[handle] -= 1
            if not _users[handle]:
                del _users[handle]
                self._set_threads(0)
            _ctypes.dlclose(handle)

    def _set_threads(self, threads: int) -> None:
        """Libraries from before teams existed have none."""
        if (set_threads := getattr(self._library, "SetThreads", None)) is not None:
            set_threads(ctypes.c_uint32(threads))
