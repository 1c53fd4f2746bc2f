"""Observers of the engine (engine/observer.py): metrics, step traces, recordings of traffic, the dashboard's data."""
