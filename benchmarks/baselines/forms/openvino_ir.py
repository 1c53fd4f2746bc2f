"""Write a GGUF file as openvino-genai's folder (IR and tokenizers), with its weights as they are, or at 8 bits.

    PYTHON openvino_ir.py IN.gguf OUT as-is|int8|int8-sym

openvino-genai reads GGUF by itself and can save the model that it makes of it. From F16 that model has float16
matrices. "int8" and "int8-sym" store each as 8 bits with one float16 scale an output channel, as NNCF's INT8_ASYM (what
optimum-intel exports by default: a zero point as well, the channel's extremes kept) and INT8_SYM do. From Q8_0 "as-is"
is uint8 in groups of 32 with a scale and a zero point each: nearer to the weights, and slower.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

SMALLEST = 20_000
"""Values of the smallest constant that counts as a weight."""


def main(source: str, target: str, weights: str) -> None:
    """Write the folder."""
    ov: Any = import_module("openvino")
    ovg: Any = import_module("openvino_genai")
    out = Path(target)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        gguf = Path(folder) / "model.gguf"  # the model is saved beside the file that was read
        gguf.symlink_to(Path(source).absolute())
        ovg.LLMPipeline(str(gguf), "CPU", enable_save_ov_model=True, ATTENTION_BACKEND="SDPA")
        for file in Path(folder).glob("openvino_*token*"):
            shutil.copy(file, out)
        model = ov.Core().read_model(Path(folder) / "openvino_model.xml")
        if weights != "as-is" and compress(model, symmetric=weights == "int8-sym") == 0:
            raise SystemExit(f"{source}: openvino-genai made no float16 matrices of it")
        ov.save_model(model, out / "openvino_model.xml", compress_to_fp16=False)


def compress(model: Any, symmetric: bool) -> int:
    """Make 8 bits of every float16 matrix; how many there were."""
    ov: Any = import_module("openvino")
    op: Any = import_module("openvino.opset13")
    count = 0
    for node in model.get_ops():
        if node.get_type_name() != "Constant" or node.get_element_type() != ov.Type.f16 or len(node.shape) != 2:
            continue
        if np.prod(node.shape) < SMALLEST:
            continue
        quantized, scale, zero = quantised(node.data.astype(np.float32), symmetric)
        value = op.convert(op.constant(quantized), "f16")
        if zero is not None:
            value = op.subtract(value, op.convert(op.constant(zero), "f16"))
        value = op.multiply(value, op.constant(scale))
        for reader in list(node.output(0).get_target_inputs()):
            reader.replace_source_output(value.output(0))
        count += 1
    return count


def quantised(matrix: Any, symmetric: bool) -> tuple[Any, Any, Any]:
    """Codes [N, K], scales [N, 1] in float16, and zero points [N, 1] or None: value = (code - zero) * scale."""
    if symmetric:
        scale = np.abs(matrix).max(1, keepdims=True) / 127
        scale[scale == 0] = 1
        return np.clip(np.round(matrix / scale), -127, 127).astype(np.int8), scale.astype(np.float16), None
    low, high = np.minimum(matrix.min(1, keepdims=True), 0), np.maximum(matrix.max(1, keepdims=True), 0)
    scale = (high - low) / 255
    scale[scale == 0] = 1
    zero = np.clip(np.round(-low / scale), 0, 255)
    quantized = np.clip(np.round(matrix / scale) + zero, 0, 255)
    return quantized.astype(np.uint8), scale.astype(np.float16), zero.astype(np.uint8)


if __name__ == "__main__":
    main(*sys.argv[1:])
