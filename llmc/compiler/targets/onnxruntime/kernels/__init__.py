"""llmc's kernels for ONNX Runtime on CPU: their source, build, and matrix layout."""
