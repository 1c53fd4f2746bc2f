"""llmc: ahead-of-time compilation of LLM graphs."""

__version__ = "0.1.0"
