"""What is this user's: the store, the names of bundles in it, and what was verified here."""
