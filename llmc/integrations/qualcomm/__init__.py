"""Qualcomm's Efficient Transformers on Cloud AI."""

from __future__ import annotations

from llmc.integrations.base import Integration

INTEGRATION = Integration(
    buckets="llmc.integrations.qualcomm.buckets:Qualcomm",
)
