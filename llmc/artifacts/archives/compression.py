"""zstd around an archive: one frame with a checksum, the same bytes for the same input and version of the library.

Compression uses one thread: with several, the bytes would depend on the number of CPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from llmc.errors import DeviceError
from llmc.platforms import install_line

SUFFIXES = (".zst", ".tzst")
MAGIC = b"\x28\xb5\x2f\xfd"
LEVEL = 3
"""Measured on bundles of a 135M model, see docs/archives.md: higher levels cost much and win next to nothing."""

LEVELS = range(1, 20)
WINDOW_LOG_MAX = 27
"""Memory that reading takes at most, as the exponent of 2: 128 MiB, zstd's own default."""

_PIECE = 1 << 20


class Compressor:
    """A zstd frame, in pieces. Raises DeviceError where zstd is not installed."""

    def __init__(self, level: int) -> None:
        zstd = _zstd()
        parameter = zstd.CompressionParameter
        options = {parameter.compression_level: level, parameter.checksum_flag: 1, parameter.nb_workers: 0}
        self._compressor = zstd.ZstdCompressor(options=options)

    def compress(self, data: bytes | memoryview) -> bytes:
        """Take `data`; returns the compressed bytes that are ready."""
        return bytes(self._compressor.compress(data))

    def flush(self) -> bytes:
        """The end of the frame."""
        return bytes(self._compressor.flush())


def decompress(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The content of one frame, in pieces of 1 MiB at most.

    Raises ValueError for a frame that is damaged, cut off, followed by anything, or that takes too much memory to
    read; DeviceError where zstd is not installed.
    """
    zstd = _zstd()
    decompressor = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: WINDOW_LOG_MAX})
    for piece in pieces:
        if decompressor.eof:
            raise ValueError("something follows the end of its zstd frame")
        given = piece
        while True:
            try:
                made = decompressor.decompress(given, max_length=_PIECE)
            except zstd.ZstdError as error:
                raise ValueError(f"damaged, or takes more than {1 << WINDOW_LOG_MAX >> 20} MiB ({error})") from error
            if made:
                yield made
            given = b""
            if decompressor.eof or decompressor.needs_input:
                break
        if decompressor.eof and decompressor.unused_data:
            raise ValueError("something follows the end of its zstd frame")
    if not decompressor.eof:
        raise ValueError("cut off within its zstd frame")


def _zstd() -> Any:
    """The module of zstd: of the standard library since Python 3.14, its backport before."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError as error:
        raise DeviceError(f"zstd is needed for this archive: {install_line('archive')}") from error
    return zstd
