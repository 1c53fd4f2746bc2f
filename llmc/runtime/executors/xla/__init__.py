"""XLA executables: their file format, and running them through PJRT without torch."""
