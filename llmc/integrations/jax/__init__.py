"""JAX and its persistent compilation cache."""

from __future__ import annotations

from llmc.integrations.base import Integration

INTEGRATION = Integration(
    caches={"jax": "llmc.integrations.jax.cache:JaxCache"},
)
