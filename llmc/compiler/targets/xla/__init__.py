"""Traced programs → XLA: JAX functions, compiled for this host, or for a TPU from its description."""
