"""NVIDIA cards by AOTInductor, torch's own compiler."""
