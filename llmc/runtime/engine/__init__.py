"""The engine: requests to tokens, step by step."""
