"""`--device cpu`."""
