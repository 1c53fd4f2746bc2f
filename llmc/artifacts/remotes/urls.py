"""URLs of remotes, and which of their text may be printed."""

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
    """A parsed URL: its scheme ("" for a path), its full text, the part that may be printed, and its secrets."""

    scheme: str
    full: str
    shown: str
    secrets: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Address({self.shown!r})"

    def clean(self, text: str) -> str:
        """Remove this URL's secrets, and text that looks like credentials of another, from a text."""
        for secret in sorted(self.secrets, key=len, reverse=True):
            text = text.replace(secret, _HIDDEN)
        for pattern, shown in _IN_TEXT:
            text = pattern.sub(shown, text)
        return " ".join(text.split())


def address(url: str) -> Address:
    """Parse a URL. Raises InputError, without the URL's secrets, if it cannot be read or has no //."""
    match = _SCHEME.match(url)
    if match is None:
        return Address("", url, url, ())
    scheme = match[1].lower()
    if scheme == "file":
        return Address(scheme, url, url, ())
    if scheme != _LAYOUT and "::" not in url and not url[len(match[0]) :].startswith("//"):  # fsspec takes it as a file
        raise InputError(
            f"{scheme}:… is not a remote: write {scheme}://LOCATION/FOLDER, oci-layout:FOLDER for images in a folder, "
            f"or ./{scheme}:… for a folder of that name"
        )
    try:
        parts = urlsplit(url)
        secrets = [parts.query, parts.password or "", unquote(parts.password or "")]
        login, _, host = parts.netloc.rpartition("@")
    except ValueError:
        raise InputError(f"the {scheme} URL cannot be read; write it as {scheme}://LOCATION/FOLDER") from None
    shown = f"{scheme}://{host}{parts.path}" if url[len(match[0]) :].startswith("//") else url
    return Address(scheme, url, shown.rstrip("/"), tuple({item for item in (login, *secrets) if item}))
