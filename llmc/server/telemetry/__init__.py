"""Observers of the engine (engine/observer.py): metrics, request spans, traffic recordings, the dashboard's data."""
