"""Collecting what a store no longer needs: what there is, what may go, and the going."""
