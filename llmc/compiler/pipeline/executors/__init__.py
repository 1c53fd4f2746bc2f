"""Executors compile executables; one module each, found by the name given to `--executor`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.pipeline.executors.base import CompileExecutor


def open_executor(options: CompileOptions) -> CompileExecutor:
    """Open the executor that `options` name. Raises InputError for options that it does not take."""
    module = import_module(f"llmc.compiler.pipeline.executors.{options.executor}")
    executor: CompileExecutor = module.open_executor(options)
    return executor
