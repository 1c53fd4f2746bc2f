"""Arrival times: numbers or ISO date-times, in seconds from the first."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.traffic.timestamps import clock_from
from tests.buckets.generators import PROPERTY

MOMENTS = st.datetimes(datetime(1980, 1, 1), datetime(2100, 1, 1))


@pytest.mark.parametrize(
    ("first", "later", "seconds"),
    [
        ("2023-11-16 18:15:46.6805900", "2023-11-16 18:15:46.6805901", 1e-7),
        ("2023-11-16 18:15:46.5", "2023-11-16 18:15:48", 1.5),
        ("2023-11-16 23:59:59", "2023-11-17 00:00:01", 2),
        ("2023-11-16T18:15:46Z", "2023-11-16 18:15:47+00:00", 1),
        ("2023-11-16T18:15:46+02:00", "2023-11-16T18:15:46+01:00", 3600),
        ("2023-11-16T18:15:46+0530", "2023-11-16T12:45:46Z", 0),
        ("2024-02-28 23:59", "2024-03-01 00:00", 86460),
        (" 2023-11-16 18:15:46", "2023-11-16 18:15:45 ", -1),
        ("5", "7.25", 2.25),
        (" 1e3", "1001", 1),
        (100, 98.5, -1.5),
    ],
)
def test_the_seconds_between_two_times(first, later, seconds):
    clock = clock_from(first)
    assert clock(first) == 0
    assert clock(later) == pytest.approx(seconds, abs=1e-12)


def test_numbers_count_their_unit_and_dates_do_not():
    assert clock_from(1000, 0.001)(4000) == pytest.approx(3)
    assert clock_from("2023-11-16 18:15:46", 0.001)("2023-11-16 18:15:47") == 1


@pytest.mark.parametrize(
    "value", ["", "noon", None, True, [1], "nan", "inf", 10**400, -1e308, "16/11/2023 18:15", "2023-11-16"]
)
def test_what_is_neither_a_number_nor_a_date_is_refused(value):
    with pytest.raises(ValueError, match="is not a number like"):
        clock_from(value)
    with pytest.raises(ValueError, match="is not a number like"):
        clock_from(0)(value)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("5", "is not a date-time like"),
        (5.0, "is not a date-time like"),
        ("2023-11-16 18:15:4e1", "is not a date-time like"),
        ("2023-11-16 18:15:60", "has no such second"),
        ("2023-13-16 18:15:46", "is not a date-time: month"),
        ("2023-11-16 18:75:46", "is not a date-time: minute"),
        ("2023-11-16 18:15:46+25:00", "is not a date-time: offset"),
    ],
)
def test_a_date_that_does_not_exist_is_refused(value, reason):
    clock = clock_from("2023-11-16 18:15:46")
    with pytest.raises(ValueError, match=reason):
        clock(value)


@PROPERTY
@given(MOMENTS, st.lists(st.tuples(MOMENTS, st.none() | st.integers(-14, 14)), max_size=6))
def test_dates_agree_with_the_standard_library(first, later):
    local, zoned = clock_from(str(first)), clock_from(str(first.replace(tzinfo=UTC)))
    for moment, hours in later:
        zone = UTC if hours is None else timezone(timedelta(hours=hours))
        expected = moment.replace(tzinfo=zone) - first.replace(tzinfo=UTC)
        text = str(moment) if hours is None else str(moment.replace(tzinfo=zone))
        assert (local if hours is None else zoned)(text) == pytest.approx(expected.total_seconds(), abs=1e-6)
        with pytest.raises(ValueError, match="time zone"):
            (zoned if hours is None else local)(text)
