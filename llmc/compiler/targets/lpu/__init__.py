"""HyperAccel's LPUs."""
