"""Bundles: their manifest, and reading, writing and judging them."""
