"""Portable programs, and the AOTInductor packages made of them, on an NVIDIA card."""
