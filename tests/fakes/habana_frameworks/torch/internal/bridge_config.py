from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from habana_frameworks.torch import _accelerator


@contextmanager
def env_setting(name: str, value: Any) -> Iterator[None]:
    """A setting of the bridge, by name; KeyError where this release has none of that name."""
    if name != "PT_COMPILE_ONLY_MODE" or os.environ.get("FAKE_HPU_OLD") == "1":
        raise KeyError(name)
    before, _accelerator.accelerator().compile_only = _accelerator.accelerator().compile_only, value
    try:
        yield
    finally:
        _accelerator.accelerator().compile_only = before
