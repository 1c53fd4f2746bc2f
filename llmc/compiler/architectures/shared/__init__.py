"""What a family's file states, and what the families have in common."""
