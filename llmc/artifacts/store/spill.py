"""The place for results that a store has no room for."""

from __future__ import annotations

import threading
import weakref
from contextlib import ExitStack
from pathlib import Path

from llmc.artifacts.log import logger
from llmc.artifacts.store.workspace import Area
from llmc.artifacts.temporaries import temporary_folder
from llmc.errors import CapacityError


class Spill:
    """A folder with the layout of a store: the one given, which is kept, or a temporary one that is made when it is
    needed and removed with this object; what a killed process leaves is removed by a later one (temporaries.py).
    """

    def __init__(self, folder: str | Path | None) -> None:
        self._area = None if folder is None else Area(folder)
        self._making = threading.Lock()

    @property
    def areas(self) -> list[Area]:
        """The folder, if there is one by now."""
        return [] if self._area is None else [self._area]

    @property
    def root(self) -> Path | None:
        """Where it is, if there is one by now."""
        return None if self._area is None else self._area.layout.root

    def take(self, reason: Exception | None) -> Area:
        """The folder, because of what happened in the store. Raises CapacityError where none can be made."""
        with self._making:
            if self._area is None:
                made = ExitStack()
                try:
                    folder = made.enter_context(temporary_folder("uncached"))
                except OSError as error:
                    raise CapacityError(
                        f"no room for results: {reason}; nor for a temporary folder: {error}"
                    ) from error
                weakref.finalize(self, made.close)
                self._area = Area(folder)
                logger().warning("results are not cached but kept in %s for now: %s", folder, str(reason))
            return self._area
