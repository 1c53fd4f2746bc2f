"""From a bundle to an engine that takes requests."""
