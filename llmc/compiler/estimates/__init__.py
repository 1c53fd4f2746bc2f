"""Estimates of a compile's cost, before it runs."""
