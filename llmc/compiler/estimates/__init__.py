"""What a compile will cost, before it is run."""
