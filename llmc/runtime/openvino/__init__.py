"""What the OpenVINO executors share: opening models, the blocks of a paged cache, and slots over blocks."""
