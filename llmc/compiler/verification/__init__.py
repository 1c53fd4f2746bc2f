"""Verification: compiled graphs against the reference model, with padding poisoned."""
