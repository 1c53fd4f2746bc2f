"""Quantise a GGUF file with llama.cpp's own quantiser.

PYTHON quantise_gguf.py IN.gguf OUT.gguf F16|Q8_0|Q4_1|Q4_0|Q4_K_M
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any


def main(source: str, target: str, kind: str) -> int:
    """Exit code 0 where the file was written; tensors that are of the kind already stay as they are."""
    lc: Any = import_module("llama_cpp")
    params = lc.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = getattr(lc, f"LLAMA_FTYPE_MOSTLY_{kind}"), True
    return int(lc.llama_model_quantize(source.encode(), target.encode(), params))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
