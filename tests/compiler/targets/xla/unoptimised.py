"""XLA's code without most of its optimisations, for tests of what is computed: made in half the time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unoptimised() -> Iterator[None]:
    """What is compiled meanwhile. What depends on optimisations (memory, copies, executables' bytes) stays outside."""
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
