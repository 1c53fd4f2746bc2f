"""URLs of remotes: what they name, and what of them may be printed."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from llmc.errors import InputError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")
_HIDDEN = "***"
_LAYOUT = "oci-layout"
_IN_TEXT = (
    (re.compile(r"(://)[^/\s@]*@"), r"\1"),
    (re.compile(r"(?i)\b((?:X-Amz-[A-Za-z-]+|sig|signature|token|password|secret)=)[^&\s'\"]+"), rf"\1{_HIDDEN}"),
    (re.compile(r"(?i)(authorization['\"]?[:=]\s*['\"]?)[^'\"\r\n,}]+"), rf"\1{_HIDDEN}"),
)


class Address(NamedTuple):
    """A URL taken apart: its scheme ("" for a path), all of it, what may be printed of it, and what may not."""

    scheme: str
    full: str
    shown: str
    secrets: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Address({self.shown!r})"

    def clean(self, text: str) -> str:
        """A text without this URL's secrets, and without what looks like credentials of another."""
        for secret in sorted(self.secrets, key=len, reverse=True):
            text = text.replace(secret, _HIDDEN)
        for pattern, shown in _IN_TEXT:
            text = pattern.sub(shown, text)
        return " ".join(text.split())


def address(url: str) -> Address:
    """Take a URL apart. Raises InputError, without the URL's secrets, for one that cannot be read, or has no //."""
    match = _SCHEME.match(url)
    if match is None:
        return Address("", url, url, ())
    scheme = match[1].lower()
    if scheme == "file":
        return Address(scheme, url, url, ())
    if scheme != _LAYOUT and "::" not in url and not url[len(match[0]) :].startswith("//"):  # a file to fsspec
        raise InputError(
            f"{scheme}:… is no remote: write {scheme}://PLACE/FOLDER, oci-layout:FOLDER for images in a folder, and "
            f"./{scheme}:… for a folder of that name"
        )
    try:
        parts = urlsplit(url)
        secrets = [parts.query, parts.password or "", unquote(parts.password or "")]
        login, _, host = parts.netloc.rpartition("@")
    except ValueError:
        raise InputError(f"a {scheme} URL that cannot be read; write it as {scheme}://PLACE/FOLDER") from None
    shown = f"{scheme}://{host}{parts.path}" if url[len(match[0]) :].startswith("//") else url
    return Address(scheme, url, shown.rstrip("/"), tuple({item for item in (login, *secrets) if item}))
