"""Portable programs on an Intel Gaudi card."""
