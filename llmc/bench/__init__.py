"""Measurements of buckets, servers under load, and llmc next to other engines."""
