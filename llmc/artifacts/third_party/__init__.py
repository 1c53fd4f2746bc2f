"""Compile caches of other systems: packed into the store unchanged, and unpacked where their system looks.

    base.py       the contract of a cache and its key facts; each cache is in the integration of its system
                  (llmc/integrations/)
    contents.py   the files of a cache in a folder, and a packed cache as an entry of the store
    packing.py    packing and unpacking

Nothing in a cache is executed or unpickled; its files are only bytes. Packed content always counts as native code.
"""
