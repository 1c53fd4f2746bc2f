"""The contract of constraints: the form of a sequence's text, enforced token by token."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt


class Constraint(ABC):
    """The state of one sequence; to be used in one thread at a time.

    One that fails raises nothing: from then on it is `finished`, and `error` says why. Its sequence ends with
    finish_reason `error`; no other one notices.
    """

    @abstractmethod
    def copy(self) -> Constraint:
        """Another one, at the same place of the text."""

    @abstractmethod
    def mask(self) -> npt.NDArray[np.bool_]:
        """Which ids [V] may come next. Never empty: where nothing else may, the end tokens may."""

    @abstractmethod
    def accept(self, token_id: int) -> None:
        """Take the token that was chosen."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether the text is complete and cannot go on, or the constraint failed: the sequence has to end."""

    @property
    def error(self) -> str | None:
        """Why the text could not be followed to its end, such as a grammar that became too complex."""
        return None
