"""Kernels of llmc's own for ONNX Runtime on CPU: their source, how it is built, and the layout of what they read."""
