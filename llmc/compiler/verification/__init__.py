"""Verification: compiled graphs against the reference model, with NaN in the padding."""
