"""Portable programs in torch on CPU."""
