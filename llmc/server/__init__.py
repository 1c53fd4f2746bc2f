"""The OpenAI-compatible server over one bundle; needs the extra `serve`. `llmc serve` runs it."""
