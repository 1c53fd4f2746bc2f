"""The OpenVINO executors. This package imports openvino without its model converter, which serving never needs.

Importing openvino imports openvino.tools.ovc if possible: 140 modules (numpy.ma, urllib, ssl, http), two thirds of the
time. The package works without it, so its import is made to fail while openvino is imported. `openvino.convert_model`
still exists, and imports the converter when called. If openvino is already imported or not installed, nothing changes.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from llmc.quiet import silence_converter

_CONVERTER = "openvino.tools.ovc"


def import_light() -> None:
    """Import openvino without its converter, unless already imported."""
    silence_converter()
    if "openvino" in sys.modules or _CONVERTER in sys.modules:
        return
    hidden: dict[str, Any] = sys.modules  # None marks a module as not importable
    hidden[_CONVERTER] = None
    try:
        with suppress(ImportError):  # the code that needs openvino reports the error
            import openvino

            if not hasattr(openvino, "convert_model"):
                openvino.convert_model = _convert_model
    finally:
        del hidden[_CONVERTER]


def _convert_model(*args: Any, **options: Any) -> Any:
    import openvino
    from openvino.tools.ovc import convert_model

    openvino.convert_model = convert_model
    return convert_model(*args, **options)


import_light()
