"""Routes, one module per group; app.py includes the `router` of each."""
