"""Locations of a bundle's weights in the file "weights", for runtimes that take weights by name.

weights.json = {name: {"shape": [int, …], "dtype": str, "offset": bytes, "length": bytes}}
"""

from __future__ import annotations

import json
import math
import mmap
from typing import TYPE_CHECKING, Any

from llmc.errors import ArtifactError

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle

PLACEMENTS_FILE = "weights.json"
MAX_RANK = 16


def read_placements(bundle: Bundle) -> dict[str, dict[str, Any]]:
    """The locations by name. Raises ArtifactError if weights.json is invalid."""
    try:
        found = json.loads(bundle.files.read(PLACEMENTS_FILE))
    except (ValueError, RecursionError) as error:
        raise ArtifactError(
            f"{bundle.path}: {PLACEMENTS_FILE} is not JSON ({error}); compile the bundle again"
        ) from error
    if not isinstance(found, dict) or not all(map(_is_placement, found.values())):
        raise ArtifactError(f"{bundle.path}: {PLACEMENTS_FILE} is not a table of weights; compile the bundle again")
    return found


def map_weights(bundle: Bundle, access: int) -> mmap.mmap:
    """Map the weights file. Raises ArtifactError if it is missing, altered or empty."""
    path = bundle.files.path("weights")
    with path.open("rb") as file:
        try:
            return mmap.mmap(file.fileno(), 0, access=access)
        except ValueError as error:
            raise ArtifactError(f"{bundle.path}: its weights are empty; compile the bundle again") from error


def _is_placement(placement: object) -> bool:
    if (
        not isinstance(placement, dict)
        or not isinstance(shape := placement.get("shape"), list)
        or len(shape) > MAX_RANK
    ):
        return False
    numbers = [*shape, placement.get("offset"), placement.get("length")]
    if not all(type(number) is int and 0 <= number < 1 << 60 for number in numbers):
        return False
    return isinstance(placement.get("dtype"), str) and math.prod(size or 1 for size in shape) < 1 << 60
