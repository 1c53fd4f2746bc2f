"""Engines compared on the same weights, in turn, on this host: what compare.py and the suite measure with."""
