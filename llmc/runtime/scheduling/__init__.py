"""What runs next: a pure, deterministic state machine over slots and buckets; see base.py."""
