"""Compile caches of other systems: packed into the store as they are, and put back where their system looks.

    base.py       the contract of a cache; each is in the integration of its system (llmc/integrations/)
    tree.py       the files of a cache in a folder
    facts.py      key facts: what a tree carries, what this host has, how two sets compare
    contents.py   an entry of the store as a packed cache, and which paths one may have
    packing.py, unpacking.py

Nothing in a cache is executed or unpickled; files are bytes here. What is packed counts as native code everywhere.
"""
