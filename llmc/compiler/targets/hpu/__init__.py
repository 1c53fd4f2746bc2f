"""Intel Gaudi (hpu)."""
