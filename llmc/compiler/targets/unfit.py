"""Options that do not fit the model."""

from __future__ import annotations

from typing import Any

from llmc.errors import CompileError


class UnfitError(CompileError):
    """The chosen options do not fit the model: `why`. `instead`: options (options.py) that fit. If the user did not ask
    for the options that do not fit, a compile continues with `instead` and says why."""

    def __init__(self, why: str, advice: str, **instead: Any) -> None:
        super().__init__(f"{why}; {advice}")
        self.why = why
        self.instead = instead


def unfit_for_kernels(why: str) -> UnfitError:
    """The error that says why ONNX Runtime's own kernels have to do instead of llmc's."""
    advice = "use --kernels onnxruntime, without --kv-cache-dtype and --prompt-dtype"
    return UnfitError(why, advice, kernels="onnxruntime", kv_cache_dtype=None, prompt_dtype=None)
