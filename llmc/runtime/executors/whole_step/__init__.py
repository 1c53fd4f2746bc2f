"""Portable programs whose whole step, cache included, is one graph on a card; what cards of any maker share."""
