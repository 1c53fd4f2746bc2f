"""Weights of a lowered program: how each is made, and the file that holds them."""
