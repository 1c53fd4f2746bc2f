from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from habana_frameworks.torch import _card


@contextmanager
def env_setting(name: str, value: Any) -> Iterator[None]:
    """A setting of the bridge, by name; KeyError where this release has none of that name."""
    if name != "PT_COMPILE_ONLY_MODE" or os.environ.get("FAKE_HPU_OLD") == "1":
        raise KeyError(name)
    before, _card.card().compile_only = _card.card().compile_only, value
    try:
        yield
    finally:
        _card.card().compile_only = before
