"""XLA executables: their file, and running them on a device that PJRT knows, without torch."""
