"""HyperAccel LPUs, through HyperDex in its own process."""
