"""What traffic looks like: its lengths, how many requests run at once, and how both change over time."""
