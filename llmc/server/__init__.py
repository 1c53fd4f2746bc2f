"""The OpenAI-compatible server over one bundle, run by `llmc serve`; needs the extra `serve`."""
