"""Text of strangers (names in a manifest, a checkpoint, a log), and URLs, as a terminal or a log may show them."""

from __future__ import annotations

import re

_LOGIN = re.compile(r"(://)[^/\s@]+@")

_HARMFUL = (
    *range(0x20), 0x7F, *range(0x80, 0xA0),  # controls: they move the cursor, colour, set titles, answer
    0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A),  # they turn the direction of what follows
    0x2028, 0x2029, *range(0xD800, 0xE000),  # line ends, and halves of characters, which no stream takes
)  # fmt: skip
_ESCAPES = {code: chr(code).encode("unicode_escape").decode() for code in _HARMFUL}
_OF_LINES = {code: text for code, text in _ESCAPES.items() if chr(code) not in "\n\t"}


def shown(text: str) -> str:
    """A part of a line, with what a terminal would obey, and line ends, as Python's escapes: "\\x1b[2J"."""
    return text.translate(_ESCAPES)


def without_logins(text: str) -> str:
    """A text without the user and password of the URLs in it: "https://***@host/path"."""
    return _LOGIN.sub(r"\1***@", text)


def shown_lines(text: str) -> str:
    """Text of several lines, escaped as `shown` does, but for line ends and tabs."""
    return text.translate(_OF_LINES)
