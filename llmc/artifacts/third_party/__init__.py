"""Compile caches of other systems: packed into the store unchanged, and unpacked where their system looks.

Nothing in a cache is executed or unpickled; its files are only bytes. Packed content always counts as native code. Each
cache is in the integration of its system (llmc/integrations/).
"""
