"""Embedding and scoring over bundles without a cache: tokenization, batches by length, pooling."""
