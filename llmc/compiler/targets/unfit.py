"""A choice that the model turns out not to fit."""

from __future__ import annotations

from typing import Any

from llmc.errors import CompileError


class UnfitError(CompileError):
    """What was chosen does not fit the model: `why`. `instead`: options (options.py) that do; where none of
    them was asked for, a compile goes on with these, and says why."""

    def __init__(self, why: str, advice: str, **instead: Any) -> None:
        super().__init__(f"{why}; {advice}")
        self.why = why
        self.instead = instead


def unfit_for_kernels(why: str) -> UnfitError:
    """The error that says why ONNX Runtime's own kernels have to do instead of llmc's."""
    return UnfitError(why, "use --kernels onnxruntime", kernels="onnxruntime")
