"""Checks of the keys and values in the cache: values beyond its precision's range must not be served.

A graph may write them as infinities, as the largest number that the precision has, or as NaN; each counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.errors import VerificationError
from llmc.runtime.executors.base import Executor

LARGEST = {"f16": 65504.0, "float16": 65504.0, "fp8": 448.0}
"""By the precision of a cache, of those whose range keys and values can leave."""


def beyond(tensors: Iterable[NDArray[np.float32]], dtype: str) -> int:
    """How many values of a cache of that precision are no numbers, or the largest that it has."""
    largest = LARGEST.get(dtype, np.inf)
    return sum(int(np.count_nonzero(~(np.abs(tensor) < largest))) for tensor in tensors)


def beyond_in(executor: Executor, slots: Iterable[tuple[int, int, int]]) -> int:
    """The same, of the tokens from … end − 1 of some slots, as (slot, from, end); with states, of all tokens before."""
    dtype = str(executor.bundle.manifest.options.get("kv_cache_dtype") or executor.bundle.manifest.options.get("dtype"))
    count = 0
    for slot, start, end in slots:
        tensors = executor.export_prefix(slot, end)
        count += beyond(tensors if executor.bundle.cache_shape.states else (t[:, start:] for t in tensors), dtype)
    return count


def require_held(outcome: Mapping[str, Any]) -> None:
    """Raise VerificationError for the outcome of a bucket that left such values in the cache."""
    if outcome.get("beyond"):
        raise VerificationError(
            f"{outcome['beyond']} keys and values of {outcome['bucket']} are beyond what the KV cache's precision "
            "holds: compile for one of more range, with --kv-cache-dtype bf16, f32 or int8, --kernels onnxruntime, or "
            "--dtype f32, as the device has it"
        )
