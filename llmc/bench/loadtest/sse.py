"""Server-sent events out of the pieces of a body: https://html.spec.whatwg.org/multipage/server-sent-events.html."""

from __future__ import annotations


class EventParser:
    """Finds the data of events, wherever the pieces were cut. Comments and other fields are passed over."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that `piece` completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        found = []
        for ended in lines:
            line = ended.removesuffix(b"\r")
            if not line:
                if self._data:
                    found.append(b"\n".join(self._data))
                    self._data.clear()
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
        return found
