"""Portable programs on an Intel Gaudi accelerator."""
