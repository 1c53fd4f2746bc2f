"""Startup: from a bundle to an engine that takes requests."""
