"""Optimum RBLN on Rebellions NPUs."""

from __future__ import annotations

from llmc.integrations.base import Integration

INTEGRATION = Integration(
    buckets="llmc.integrations.optimum_rbln.buckets:OptimumRbln",
)
