"""Portable programs whose whole step, cache included, is one graph on an accelerator; the vendor-independent part."""
