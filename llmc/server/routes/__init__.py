"""One file for each group of routes; each has a `router` that app.py includes."""
