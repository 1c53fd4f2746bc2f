"""Names in deployments: those that are made of a model's, and those that users give."""

from __future__ import annotations

import re

from llmc.errors import InputError

LONGEST = 40
"""Characters of a name that is made here: the longest suffix of a resource fits into Kubernetes' 63 behind it."""
_LABEL = re.compile(r"[a-z](?:[a-z0-9-]{0,51}[a-z0-9])?")
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?"
_IMAGE = re.compile(
    rf"(?:{_HOST}/)?{_PART}(?:/{_PART})*(?::[A-Za-z0-9_][A-Za-z0-9._-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?"
)


def label(text: str) -> str:
    """A label of DNS (RFC 1035) made of any text: "smollm2-demo" of "org/SmolLM2 demo", "llmc" of "?"."""
    name = re.sub(r"[^a-z0-9]+", "-", text.rpartition("/")[2].lower()).strip("-")[:LONGEST].rstrip("-")
    if not name:
        return "llmc"
    return name if name[0].isalpha() else f"llmc-{name}"[:LONGEST].rstrip("-")


def require_label(flag: str, text: str) -> str:
    """`text`, a label of DNS. Raises InputError."""
    if not _LABEL.fullmatch(text):
        raise InputError(
            f"{flag} {text!r:.80} is not a name in Kubernetes: at most 53 of a-z, 0-9 and -, a letter first, as in "
            f"{label(text)}"
        )
    return text


def require_image(flag: str, text: str) -> str:
    """`text`, the name of a container image. Raises InputError."""
    if not _IMAGE.fullmatch(text):
        raise InputError(
            f"{flag} {text!r:.80} is not a name of a container image, as in registry.example.com/llmc:0.1.0"
        )
    return text
