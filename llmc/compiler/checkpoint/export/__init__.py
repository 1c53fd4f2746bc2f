"""Write checkpoints in other formats, in floats, for programs that read nothing else."""
