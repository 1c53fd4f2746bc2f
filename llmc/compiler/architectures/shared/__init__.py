"""The contract of an architecture's file, and the parts that architectures have in common."""
