"""Lowering to OpenVINO: the fused graph as a paged-attention model, and static models for devices that want them."""
