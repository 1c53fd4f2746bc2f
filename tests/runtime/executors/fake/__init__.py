"""The fake device."""
