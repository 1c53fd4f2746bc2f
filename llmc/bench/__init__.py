"""Measuring: buckets of a bundle, servers under load, and other engines beside llmc."""
