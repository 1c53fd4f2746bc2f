"""The package's logger. `logging` is imported on first use: a server that opens an intact bundle logs nothing here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging

NAME = "llmc.artifacts"


def logger() -> logging.Logger:
    """Return the logger "llmc.artifacts": hits and misses at INFO, damage and degraded operation at WARNING."""
    import logging

    return logging.getLogger(NAME)
