"""Where executables are compiled: one file an executor, found by the name that `--executor` has.

base.py    the contract, and what all executables of a compile share
local.py   threads and processes of this host
ray.py     tasks over a Ray cluster; ray_worker.py is what runs there
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.pipeline.executors.base import CompileExecutor


def open_executor(options: CompileOptions) -> CompileExecutor:
    """The executor that `options` name; raises InputError for what it cannot be told."""
    module = import_module(f"llmc.compiler.pipeline.executors.{options.executor}")
    executor: CompileExecutor = module.open_executor(options)
    return executor
