"""NVIDIA GPUs by XLA:GPU, which compiles without a GPU or its driver."""
