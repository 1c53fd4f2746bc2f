"""Weights of a lowered program: how each tensor is built, and the file that holds them."""
