"""`llmc serve --executor ray`: what it refuses."""

from __future__ import annotations

import pytest

from tests.cli.helpers import Llmc


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--executor", "cloud"), "unknown executor 'cloud'"),
        (("--executor", "ray", "--uds", "socket"), "--uds: not for --executor ray"),
        (("--executor", "ray", "--replicas", "many"), "--replicas many: write it as N or MIN-MAX"),
        (("--executor", "ray", "--replicas", "3-2"), "--replicas 3-2"),
        (("--executor", "ray", "--port", "0"), "--port 0"),
        (("--scale-down-after", "1h"), "--scale-down-after: not for --executor local"),
        (("--executor", "ray", "--scale-up-after", "soon"), "--scale-up-after"),
        (("--executor", "ray", "--address", "127.0.0.1:1"), "no Ray cluster at 127.0.0.1:1"),
    ],
)
def test_what_cannot_be_is_one_clear_error(llmc: Llmc, flags: tuple[str, ...], message: str) -> None:
    ran = llmc("serve", "bundle", *flags)
    assert ran.code in (2, 3) and message in ran.err.replace("\n", " ")
