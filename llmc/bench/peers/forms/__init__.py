"""Programs that make a peer's form of a model with the peer's own tools; each runs in the peer's Python, by itself."""
