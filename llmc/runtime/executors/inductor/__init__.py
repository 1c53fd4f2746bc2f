"""Portable programs, and AOTInductor packages compiled from them, on an NVIDIA GPU."""
