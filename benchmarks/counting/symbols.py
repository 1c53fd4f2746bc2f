"""Functions of a 64-bit ELF file, and the source files that they are from."""

from __future__ import annotations

import struct
from bisect import bisect_right
from pathlib import Path

_FUNCTION, _FILE, _SYMBOLS, _LOADED = 2, 4, 2, 1


class Symbols:
    """Those of one file; of a stripped one none."""

    def __init__(self, path: Path) -> None:
        data = path.read_bytes()
        programs, sections = struct.unpack_from("<QQ", data, 32)
        program_size, programs_count, section_size, sections_count = struct.unpack_from("<4H", data, 54)
        loaded = [struct.unpack_from("<IIQQQQ", data, programs + i * program_size) for i in range(programs_count)]
        heads = [struct.unpack_from("<IIQQQQIIQQ", data, sections + i * section_size) for i in range(sections_count)]
        found: list[tuple[int, str, str]] = []
        for _, kind, _, _, offset, size, link, *_ in heads:
            if kind != _SYMBOLS:
                continue
            names, source = heads[link][4], ""
            for at in range(offset, offset + size, 24):
                name, info, _, section, value = struct.unpack_from("<IBBHQ", data, at)
                text = data[names + name : data.index(0, names + name)].decode(errors="replace")
                if info & 15 == _FILE:
                    source = text
                elif info & 15 == _FUNCTION and section:
                    of = source if info >> 4 == 0 else ""  # a function that others may call is after all files
                    found += [
                        (value - address + start, text, of) for kind, _, start, address, _, length in loaded
                        if kind == _LOADED and address <= value < address + length
                    ]  # fmt: skip
        self._found = sorted(found)
        self._starts = [start for start, _, _ in self._found]

    def at(self, offset: int) -> tuple[str, str]:
        """The function around a place in the file, and its source file; "" where it is not known."""
        index = bisect_right(self._starts, offset) - 1
        return self._found[index][1:] if index >= 0 else ("", "")
