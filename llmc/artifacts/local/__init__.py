"""This user's store, references to bundles in it, and the notes of results that were verified here."""
