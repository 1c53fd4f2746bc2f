"""The fake device, computed in numpy."""
