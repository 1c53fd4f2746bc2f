"""Quantities as typed."""

from __future__ import annotations

import math

import pytest

from llmc.cli.options import duration, fraction, rate, size
from llmc.errors import InputError


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (fraction, "10%", 0.1),
        (fraction, "0.25", 0.25),
        (fraction, " 0 ", 0.0),
        (duration, "90", 90.0),
        (duration, "30m", 1800.0),
        (duration, "1.5h", 5400.0),
        (duration, "2 min", 120.0),
        (duration, "30d", 30 * 86400.0),
        (duration, "2w", 14 * 86400.0),
        (size, "512MiB", 512 << 20),
        (size, "8GB", 8 * 10**9),
        (size, "20G", 20 * 10**9),
        (size, "2e9", 2 * 10**9),
        (rate, "5.5", 5.5),
        (rate, "inf", math.inf),
    ],
)
def test_what_people_type(read, text, value):
    assert read("--flag", text) == pytest.approx(value)
    assert read("--flag", None) is None


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (fraction, "ten", "a fraction such as 0.1 or 10%"),
        (fraction, "-1", "a fraction"),
        (duration, "3 weeks", "a time such as 90s, 30m, 1.5h or 30d"),
        (size, "8 parsecs", "a size such as 512MiB or 8GB"),
        (size, "", "a size"),
        (rate, "0", "a number of requests per second above 0, or inf"),
        (rate, "fast", "a number of requests per second above 0, or inf"),
    ],
)
def test_anything_else_is_named(read, text, expected):
    with pytest.raises(InputError, match=f"--flag '{text}' is not {expected}"):
        read("--flag", text)
