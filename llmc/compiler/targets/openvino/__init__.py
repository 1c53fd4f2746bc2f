"""Lowering to OpenVINO: the fused graph as a paged-attention model, or as static models for devices that need them."""
