"""ONNX Runtime, on this host's CPU."""
