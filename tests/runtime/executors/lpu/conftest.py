from tests.hyperdex import lpu

__all__ = ["lpu"]
