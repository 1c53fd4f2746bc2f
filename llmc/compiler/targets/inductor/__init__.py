"""NVIDIA GPUs by AOTInductor, torch's compiler."""
