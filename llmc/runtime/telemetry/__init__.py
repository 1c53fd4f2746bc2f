"""Who watches the engine (runtime/observer.py): metrics, step traces, recordings of traffic, the dashboard's data."""
