"""Witnesses of the whole process, whatever the device; the contract is in runtime/executors/compilations.py."""
