"""Whatever is wrong with a trace is named: the file, the line, the column, the value."""

from __future__ import annotations

import gzip
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.traffic import rows, trace_file
from llmc.buckets.traffic.reader import Trace
from llmc.errors import InputError
from tests.buckets.generators import PROPERTY
from tests.buckets.traffic.files import AZURE, read, written

HEAD = "time,prompt_tokens,output_tokens,cached_tokens\n1,5,2,0\n"


def refused(folder, name: str, text: str | bytes) -> str:
    with pytest.raises(InputError) as caught:
        read(folder, name, text)
    message = str(caught.value)
    assert name in message
    return message


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("2,-5,2,0", "line 3, column 'prompt_tokens': found '-5', which is not a number of tokens"),
        ("2,5.5,2,0", "line 3, column 'prompt_tokens': found '5.5'"),
        ("2,5,two,0", "line 3, column 'output_tokens': found 'two'"),
        ("2,5,,0", "line 3, column 'output_tokens': found nothing"),
        ("2,nan,2,0", "line 3, column 'prompt_tokens': found 'nan'"),
        ("2,inf,2,0", "line 3, column 'prompt_tokens': found 'inf'"),
        ("2,2147483648,2,0", "line 3, column 'prompt_tokens': found '2147483648'"),
        ("2," + "9" * 5000 + ",2,0", "line 3, column 'prompt_tokens': found '9999999"),
        ("2,5,2,-1", "line 3, column 'cached_tokens': found '-1'"),
        ("2,5,2,6", "line 3: 6 cached tokens of a prompt of 5"),
        ("2,5,2", "line 3: 3 fields where the header has 4"),
        ("2", "line 3: 1 fields where the header has 4"),
        ("2,5,2,0,9", "line 3: 5 fields where the header has 4"),
        ("soon,5,2,0", "line 3, column 'time': 'soon' is not a number"),
        (",5,2,0", "line 3, column 'time': '' is not a number"),
        ("nan,5,2,0", "line 3, column 'time': 'nan' is not a number"),
        ("2023-11-16 18:15:46,5,2,0", "line 3, column 'time': '2023-11-16 18:15:46' is not a number"),
        ('2,5,2,"0' + "x" * 200_000, "not comma-separated text: field larger than field limit"),
        ("2,5\r6,2,0", "line 3: not comma-separated text: new-line character"),
    ],
)
def test_a_csv_row_that_cannot_be_used(tmp_path, row, message):
    assert message in refused(tmp_path, "t.csv", f"{HEAD}{row}\n3,1,1,0\n")


def test_messages_are_short_and_say_what_to_do(tmp_path):
    message = refused(tmp_path, "t.csv", f"{HEAD}2,{'x' * 5000},2,0\n")
    assert len(message) < 400
    assert message.endswith("correct or remove the line")


def test_the_line_is_the_physical_one(tmp_path):
    text = 'note,input_tokens,output_tokens\n\n"two\nlines",5,2\n\n"x",5,bad\n'
    assert "line 6, column 'output_tokens': found 'bad'" in refused(tmp_path, "t.csv", text)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ('{"time": 2, "prompt_tokens": 5, "output_tokens": -2}', "line 3, column 'output_tokens': found -2"),
        ('{"time": 2, "prompt_tokens": 5, "output_tokens": 2.5}', "line 3, column 'output_tokens': found 2.5"),
        ('{"time": 2, "prompt_tokens": 5, "output_tokens": true}', "line 3, column 'output_tokens': found True"),
        ('{"time": 2, "prompt_tokens": [5], "output_tokens": 2}', r"line 3, column 'prompt_tokens': found [5]"),
        ('{"time": 2, "prompt_tokens": null, "output_tokens": 2}', "line 3, column 'prompt_tokens': found nothing"),
        ('{"time": 2, "prompt_tokens": NaN, "output_tokens": 2}', "line 3, column 'prompt_tokens': found nan"),
        ('{"time": 2, "prompt_tokens": Infinity, "output_tokens": 2}', "line 3, column 'prompt_tokens': found inf"),
        ('{"time": 2, "output_tokens": 2}', "line 3: no column for the prompt tokens; found 'time', 'output_tokens'"),
        ('{"prompt_tokens": 5, "output_tokens": 2}', "line 3: the time is in no column, but in time"),
        ('{"arrival": 2, "prompt_tokens": 5, "output_tokens": 2}', "line 3: the time is in arrival, but in time"),
        ('{"time": true, "prompt_tokens": 5, "output_tokens": 2}', "line 3, column 'time': True is not a number"),
        ('{"time": NaN, "prompt_tokens": 5, "output_tokens": 2}', "line 3, column 'time': nan is not a number"),
        ('{"time": null, "prompt_tokens": 5, "output_tokens": 2}', "line 3, column 'time': None is not a number"),
        ('{"time": 2, "prompt_tokens": 5, "output', "line 3, column 33: not valid JSON: Unterminated string"),
        ('{"time": 2, "prompt_tokens": 5,, }', "line 3, column 32: not valid JSON"),
        ('{"time": 2} {"time": 3}', "line 3, column 13: not valid JSON: Extra data"),
        ("[1, 2]", "line 3: [1, 2] is not a JSON object; write one object a line"),
        ("7", "line 3: 7 is not a JSON object"),
        ("[" * 100_000, "line 3: not valid JSON"),
        ('{"prompt_tokens": ' + "1" * 5000 + ', "output_tokens": 2}', "line 3: not valid JSON: Exceeds the limit"),
        (
            '{"time": 2, "prompt_tokens": 5, "output_tokens": 2, "cached_tokens": 9}',
            "line 3: 9 cached tokens of a prompt of 5",
        ),
    ],
)
def test_a_json_line_that_cannot_be_used(tmp_path, record, message):
    first = '{"time": 1, "prompt_tokens": 5, "output_tokens": 2}'
    assert message in refused(tmp_path, "t.jsonl", f"{first}\n\n{record}\n{first}\n")


def test_more_layouts_than_are_remembered_are_read_all_the_same(tmp_path):
    text = "".join(f'{{"prompt_tokens": 5, "output_tokens": 2, "x{i % 90}": 0}}\n' for i in range(3 * rows.MAX_LAYOUTS))
    assert len(read(tmp_path, "t.jsonl", text)) == 3 * rows.MAX_LAYOUTS


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (
            "time,model",
            "line 1: no column for the prompt tokens; found 'time', 'model'; name one of them prompt_tokens",
        ),
        (
            "prompt_tokens,model",
            "no column for the output tokens; found 'prompt_tokens', 'model'; name one of them out",
        ),
        ("1,5,2", "no column for the prompt tokens; found '1', '5', '2'"),
        ("a;b;c", "found 'a;b;c'"),
        (",".join(f"c{i}" for i in range(40)), "'c11' and 28 more"),
        ("input_tokens,output_tokens,prompt_len", "the columns 'input_tokens' and 'prompt_len' both mean the prompt"),
        ("time,time,input_tokens,output_tokens", "the columns 'time' and 'time' both mean the time"),
    ],
)
def test_columns_that_cannot_be_reported(tmp_path, header, message):
    assert message in refused(tmp_path, "t.csv", f"{header}\n")


@pytest.mark.parametrize("text", ["", "\n \n", "\ufeff"])
@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t"])
def test_an_empty_file(tmp_path, name, text):
    assert "the file is empty" in refused(tmp_path, name, text)


@pytest.mark.parametrize(
    ("text", "skipped"),
    [("input_tokens,output_tokens\n", 0), ("input_tokens,output_tokens\n5,0\n0,5\n0,0\n", 3)],
)
def test_a_trace_without_a_request(tmp_path, text, skipped):
    assert f"no request with a prompt and output ({skipped} without)" in refused(tmp_path, "t.csv", text)
    with pytest.raises(InputError, match="no request"):
        Trace(tmp_path / "t.csv").summary()


def test_a_json_array_is_reported_to_be_lines(tmp_path):
    text = '[\n{"prompt_tokens": 5, "output_tokens": 2}\n]'
    for name in ("t.json", "t"):
        assert "write one JSON object a line" in refused(tmp_path, name, text)


def test_a_byte_that_is_not_utf8(tmp_path):
    message = refused(tmp_path, "t.csv", AZURE.encode() + b"2023-11-16 18:16:02,\xff,5\n")
    assert "line 5: byte 0xff is not UTF-8" in message


def test_the_line_of_a_bad_byte_far_into_the_file(tmp_path):
    text = b"input_tokens,output_tokens\n" + b"5,2\n" * (trace_file.CHUNK_BYTES // 2) + b"5,\xe9\n5,2\n"
    assert f"line {trace_file.CHUNK_BYTES // 2 + 2}: byte 0xe9" in refused(tmp_path, "t.csv", text)


def test_a_file_on_one_line_is_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_file, "MAX_LINE_BYTES", 1 << 20)
    assert "a line is longer than 1 MiB" in refused(tmp_path, "t.json", b"[" + b" " * (1 << 22))


@pytest.mark.parametrize("keep", [5, 15, -20, -4])
def test_a_truncated_gzip(tmp_path, keep):
    data = gzip.compress(AZURE.encode() * 50)
    assert "damaged gzip file" in refused(tmp_path, "t.csv.gz", data[:keep])


def test_a_damaged_gzip(tmp_path):
    data = bytearray(gzip.compress(AZURE.encode() * 50))
    data[40] ^= 0xFF
    assert "damaged gzip file" in refused(tmp_path, "t.csv.gz", bytes(data))
    assert "damaged gzip file: Not a gzipped file" in refused(tmp_path, "u.csv.gz", AZURE)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match=re.escape(f"cannot read the trace {tmp_path / 'no.csv'}: No such file")):
        Trace(tmp_path / "no.csv")


def test_a_directory_and_a_pipe_are_no_traces(tmp_path):
    with pytest.raises(InputError, match="is a directory; give a trace file"):
        Trace(tmp_path)
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(InputError, match="is not a regular file"):
        Trace(tmp_path / "pipe.csv")


def test_a_name_that_no_file_can_have():
    with pytest.raises(InputError, match=r"null (byte|character)"):
        Trace("t\0.csv")


def test_a_file_that_goes_away(tmp_path):
    path = written(tmp_path, "t.csv", AZURE)
    trace = Trace(path)
    path.unlink()
    with pytest.raises(InputError, match=r"cannot read the trace .*No such file"):
        list(trace)
    with pytest.raises(InputError, match=r"cannot read the trace .*No such file"):
        trace.digest()


PIECES = ["time", "prompt_tokens", "output_tokens", "timestamp", "input_length", "5", "-1", "2.5", "0", "1e999", "null"]
MARKS = [*',:{}[]"\\ \n\r\t', "\0", "\ufeff", "é", "[" * 2000, "2023-11-16 18:15:46", "T", "Z"]


@PROPERTY
@given(
    st.sampled_from(["t.csv", "t.jsonl", "t", "t.gz"]),
    st.lists(st.sampled_from([*PIECES, *PIECES, *MARKS]), max_size=40).map(lambda found: "".join(found).encode())
    | st.binary(max_size=60),
    st.sampled_from([b"", b"time,prompt_tokens,output_tokens\n", b'{"prompt_tokens": 5, "output_tokens": 2}\n']),
)
def test_no_file_does_worse_than_an_input_error(tmp_path_factory, name, data, head):
    try:
        requests = read(tmp_path_factory.mktemp("fuzz"), name, head + data)
    except InputError as error:
        assert name in str(error)
    else:
        assert requests
        assert all(request.prompt > request.cached >= 0 and request.output > 0 for request in requests)
        assert [request.time for request in requests] == sorted(request.time for request in requests)
