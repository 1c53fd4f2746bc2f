"""Requantise a GGUF to 8 bits a weight (Q8_0), for peers that are to read as many bytes as llmc's int8 bundle.

PEERS/bin/python benchmarks/serving_gguf.py MODEL.gguf OUT.gguf
"""

from __future__ import annotations

import sys

import llama_cpp as lc

if __name__ == "__main__":
    params = lc.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = lc.LLAMA_FTYPE_MOSTLY_Q8_0, True
    sys.exit(lc.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), params))
