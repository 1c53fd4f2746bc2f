"""Prompts computed by one executor, decoded by another: in one process, in two, or on two hosts."""
