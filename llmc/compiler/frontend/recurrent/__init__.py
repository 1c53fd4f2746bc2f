"""Layers with recurrent state of fixed size instead of keys and values: convolutions, linear attention, state
spaces."""
