"""Escape untrusted text (names in manifests, checkpoints or logs) and URLs for terminals and logs."""

from __future__ import annotations

import re

_LOGIN = re.compile(r"(://)[^/\s@]+@")

_HARMFUL = (
    *range(0x20), 0x7F, *range(0x80, 0xA0),  # controls: move the cursor, set colours or titles
    0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A),  # change the text direction
    0x2028, 0x2029, *range(0xD800, 0xE000),  # line ends, and surrogates, which streams cannot encode
)  # fmt: skip
_ESCAPES = {code: chr(code).encode("unicode_escape").decode() for code in _HARMFUL}
_OF_LINES = {code: text for code, text in _ESCAPES.items() if chr(code) not in "\n\t"}


def shown(text: str) -> str:
    """Escape control characters and line ends in part of a line, as Python does: "\\x1b[2J"."""
    return text.translate(_ESCAPES)


def without_logins(text: str) -> str:
    """Remove the user and password from URLs in a text: "https://***@host/path"."""
    return _LOGIN.sub(r"\1***@", text)


def shown_lines(text: str) -> str:
    """Escape multi-line text as `shown` does, keeping line ends and tabs."""
    return text.translate(_OF_LINES)
