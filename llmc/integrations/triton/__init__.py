"""Triton, and its kernel cache."""

from __future__ import annotations

from llmc.integrations.base import Integration

INTEGRATION = Integration(
    caches={"triton": "llmc.integrations.triton.cache:TritonCache"},
)
