"""Tables and grids in HTML: pages that stand on their own, and what notebooks show of an object."""
