"""Texts to vectors or scores over bundles without a cache: tokens, batches by length, pooling."""
