from __future__ import annotations

import gzip

from hypothesis import given
from hypothesis import strategies as st

from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.oci.tar import BLOCK, gzipped

SIZES = st.sampled_from([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])


@given(SIZES, st.integers(1, 70_000))
def test_any_tool_reads_it_however_the_bytes_came(size: int, cut: int) -> None:
    data = bytes(at % 251 for at in range(size))
    built = b"".join(gzipped(data[at : at + cut] for at in range(0, size, cut)))
    assert gzip.decompress(built) == data
    assert built == b"".join(gzipped([data]))


def test_the_bytes_never_change() -> None:
    expected = "sha256:1a0772c923215aa859251325ca3b6c88a05a8c790937afcfcff5b0c21f7e8c99"
    assert digest_bytes(b"".join(gzipped([b"content" * 20_000]))) == expected
