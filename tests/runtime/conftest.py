from tests.toys import toy, toys, trusted

__all__ = ["toy", "toys", "trusted"]
