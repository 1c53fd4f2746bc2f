"""ONNX Runtime on CPU."""
