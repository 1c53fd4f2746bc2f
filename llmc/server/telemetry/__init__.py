"""Observers of the engine (engine/observer.py): metrics, request spans, traffic recordings, dashboard data."""
