"""The buckets that serve a demand at the least cost: what to choose for, what to choose from, and the choice."""

from llmc.buckets.optimise.choice import Choice, choose, frontier
from llmc.buckets.optimise.demand import Demand
from llmc.buckets.optimise.space import ListedSpace, ProductSpace, Space

__all__ = ["Choice", "Demand", "ListedSpace", "ProductSpace", "Space", "choose", "frontier"]
