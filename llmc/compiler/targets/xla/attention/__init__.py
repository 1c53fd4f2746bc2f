"""Attention as one operator over the slot cache: in plain operators, and as a kernel for NVIDIA GPUs."""
