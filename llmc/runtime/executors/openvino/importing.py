"""The openvino package without its model converter, which serving never needs.

Importing openvino imports openvino.tools.ovc where that can be imported: 140 modules (numpy.ma, urllib, ssl, http), two
thirds of the time. The package does without it where it cannot, so it is told that it cannot, for as long as openvino
is being imported. `openvino.convert_model` is there all the same, and imports the converter when it is called. An
openvino that is imported already, or not installed, is left alone.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from llmc.quiet import silence_converter

_CONVERTER = "openvino.tools.ovc"


def import_light() -> None:
    """Import openvino so, unless it has been."""
    silence_converter()
    if "openvino" in sys.modules or _CONVERTER in sys.modules:
        return
    hidden: dict[str, Any] = sys.modules  # None for a module means: cannot be imported
    hidden[_CONVERTER] = None
    try:
        with suppress(ImportError):  # for those to tell who need it
            import openvino

            if not hasattr(openvino, "convert_model"):
                openvino.convert_model = _convert_model
    finally:
        del hidden[_CONVERTER]


def _convert_model(*args: Any, **options: Any) -> Any:
    """openvino.tools.ovc.convert_model."""
    import openvino
    from openvino.tools.ovc import convert_model

    openvino.convert_model = convert_model
    return convert_model(*args, **options)


import_light()
