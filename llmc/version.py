"""The version of llmc, which manifests, servers and metrics say."""

__version__ = "0.1.0"
