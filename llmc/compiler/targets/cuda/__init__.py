"""NVIDIA GPUs by XLA:GPU, which needs neither the card nor its driver to compile."""
