"""Front end: one traced program per dialect from the unmodified transformers model."""
