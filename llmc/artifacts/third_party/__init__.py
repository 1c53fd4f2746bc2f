"""Compile caches of other systems: packed into the store unchanged, and unpacked where their system looks.

    base.py       the contract of a cache; each is in the integration of its system (llmc/integrations/)
    tree.py       the files of a cache in a folder
    facts.py      key facts: those in a tree, those of this host, and how two sets compare
    contents.py   a packed cache as an entry of the store, and the paths it may have
    packing.py, unpacking.py

Nothing in a cache is executed or unpickled; its files are only bytes. Packed content always counts as native code.
"""
