"""What faults.py puts into the caches, how it damages files, and what it counts."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

SIZES = (300, 20_000, 300_000)


@dataclass
class Row:
    """What one kind of fault did. wrong: other bytes than were put under the key were returned. lost: `put` had
    returned (and nothing was damaged later), yet a new process does not find it. wedged: a new process that looks the
    key up, and puts it again on a miss, leaves the next process without it. raised: `get` or `put` raised instead of
    missing or going on; no fault by itself where the library's caller catches it. left: temporaries after a sweep. All
    but injected and left count keys, of which one fault may hit several.
    """

    fault: str
    injected: int = 0
    wrong: int = 0
    lost: int = 0
    wedged: int = 0
    raised: int = 0
    left: int = 0

    def add(self, found: dict[str, int]) -> None:
        """Count what a judge found."""
        for name, count in found.items():
            setattr(self, name, getattr(self, name) + count)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def payload(name: int) -> bytes:
    """The content that belongs to a key."""
    return random.Random(name).randbytes(SIZES[name % len(SIZES)])


def flip(data: bytes, index: int) -> bytes:
    """One bit of one byte is another."""
    return data[:index] + bytes([data[index] ^ 1 << index % 8]) + data[index + 1 :]


def cut(data: bytes, index: int) -> bytes:
    """The file ends here."""
    return data[:index]


def zeros(data: bytes, index: int) -> bytes:
    """From here on zeros, as after a power cut."""
    return data[:index] + bytes(len(data) - index)
