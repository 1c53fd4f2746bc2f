"""Whatever a file holds, it is read or refused in words: no other exception, whatever the format."""

from __future__ import annotations

import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.report.traffic_view import view
from llmc.buckets.traffic.formats import FORMATS
from llmc.buckets.traffic.formats.fields import parse
from llmc.errors import InputError
from tests.buckets.generators import PROPERTY
from tests.buckets.traffic.files import AZURE, written
from tests.buckets.traffic.formats import logs, test_prometheus
from tests.buckets.traffic.formats.test_recognition import SEEN
from tests.integrations.test_logs import GAUDI, SIZES, TABLE

TEXTS = [
    *(text for _, text in SEEN),
    *(AZURE, TABLE, GAUDI, SIZES.format(process="Worker_TP0", pid=1, second=1, found="[(8, 5, 1.5), (16, 2, 2.0)]")),
    logs.received("a", 9, 0) + "\n" + logs.generated("a", 3, 1),
    logs.scrape([3, 2, 1], [4, 1, 0]) + logs.scrape([4, 2, 1], [5, 1, 0]),
    test_prometheus.TestApi().answer((1, [1, 0, 0]), (2, [4, 1, 0])),
    logs.batch(logs.span("t", "a", 1, {"gen_ai.usage.input_tokens": 7, "gen_ai.usage.output_tokens": 3}, parent="b")),
    json.dumps({"response": {"body": {"usage": {"input_tokens": 3, "output_tokens": 1}}}}),
]
VALUES = st.sampled_from(
    ["", "-1", "1e400", "9" * 30, "null", "[]", "{}", "true", '"x"', "NaN", "+Inf", *"\x00é\n]}\"',"]
)


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """A log of some format, some parts of which are replaced."""
    text = draw(st.sampled_from(TEXTS))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(text)))
        length = draw(st.sampled_from([0, 1, 1, 2, 5, 40]))
        text = text[:start] + draw(VALUES) + text[start + length :]
    return text


def seen(path, **more) -> None:
    try:
        found = view(path, **more)
    except InputError as error:
        assert len(str(error)) < 2000
    else:
        assert found.text.endswith("\n") and json.dumps(found.document)


@PROPERTY
@given(damaged())
def test_damaged_logs(tmp_path_factory, text):
    seen(written(tmp_path_factory.mktemp("h"), "log", text))


@PROPERTY
@given(damaged(), st.sampled_from(sorted(FORMATS.names())))
def test_damaged_logs_read_as_what_they_are_not(tmp_path_factory, text, name):
    path = written(tmp_path_factory.mktemp("h"), "log", text)
    if name == "fields":
        seen(path, format=name, fields=parse("prompt=usage.prompt_tokens,output=ContextTokens,time=created"))
    else:
        seen(path, format=name)


@PROPERTY
@given(st.binary(max_size=300))
def test_bytes_that_nobody_wrote(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("h")
    seen(written(folder, "log", content))
    seen(written(folder, "log.gz", zlib.compress(content, wbits=31)))


NUMBERS = ("1e400", "-1e400", "9" * 5000, "NaN", "1.2.3", "0x10", "-0", "٣", "1e300", "1_000")


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    "text",
    [
        logs.scrape([3, 2, 1], [4, 1, 0]).replace("} 3.0", "} #"),
        logs.scrape([3, 2, 1], [4, 1, 0]).replace("} 3.0", "} 3.0 #"),
        logs.scrape([3, 2, 1], [4, 1, 0]).replace('"10.0"', '"#"'),
        "llmc_sampled_seconds #\n" + logs.scrape([3, 2, 1], [4, 1, 0]),
        test_prometheus.TestApi().answer((1, [1, 0, 0])).replace('[1, "1"]', '[#, "1"]'),
        test_prometheus.TestApi().answer((1, [1, 0, 0])).replace('[1, "1"]', '[1, "#"]'),
        logs.batch(logs.span("t", "a", 1, {"gen_ai.usage.input_tokens": 7})).replace("1000000000", "#"),
        logs.batch(logs.span("t", "a", 1, {"gen_ai.usage.input_tokens": 7})).replace('"7"', '"#"'),
        '{"created": "#", "usage": {"prompt_tokens": 5, "completion_tokens": 2}}',
        '{"created": 1, "usage": {"prompt_tokens": "#", "completion_tokens": 2}}',
        '{"created": 1, "usage": {"prompt_tokens": #, "completion_tokens": 2}}',
        SIZES.format(process="a", pid=1, second=1, found="[(#, 5, 1.5)]"),
        GAUDI.replace("2108", "#"),
        TABLE.replace("42 ", "# "),
    ],
)
def test_numbers_that_are_none(tmp_path, text, number):
    assert "#" in text
    seen(written(tmp_path, "log", text.replace("#", number)))


@pytest.mark.parametrize("stamp", ["0001-01-01T00:00+14:00", "9999-12-31T23:59:59-14:00", "31/Feb/2026:00:00:00 +0000"])
def test_the_ends_of_the_calendar(tmp_path, stamp):
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    seen(written(tmp_path, "log", json.dumps({"time": stamp, "usage": usage})))
