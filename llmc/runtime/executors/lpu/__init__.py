"""HyperAccel's LPUs, through HyperDex in a process of its own."""
