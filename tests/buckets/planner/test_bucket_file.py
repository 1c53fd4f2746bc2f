"""Bucket files: what a line may say, where an error points, and what becomes of blocks."""

from __future__ import annotations

import os
import re
from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmc.buckets.bucket import Bucket
from llmc.buckets.limits import Limits
from llmc.buckets.plan import MAX_BUCKETS, Note
from llmc.buckets.planner import bucket_file
from llmc.buckets.planner.bucket_file import MAX_FILE, MAX_LINE, MAX_NUMBER, FileBucket, parse
from llmc.errors import InputError
from tests.buckets.generators import PROPERTY

LIMITS = Limits(1024, 8, 4096)
DECODE = "(8, 1, 1024)\n"
SMALL_ALPHABET = st.text("(range)[],-_0123456789 \t\n#x'\x00\r", max_size=60)


@st.composite
def axes(draw: st.DrawFn, least: int) -> tuple[str, list[int]]:
    """One axis as text, and the numbers it stands for."""
    numbers = draw(st.lists(st.integers(least, 300), min_size=1, max_size=4, unique=True))
    start, count, step = draw(st.tuples(st.integers(least, 50), st.integers(1, 5), st.integers(1, 9)))
    stop = start + count * step
    return draw(
        st.sampled_from(
            [
                (str(numbers[0]), numbers[:1]),
                (str(numbers), numbers),
                (f"({', '.join(map(str, numbers))},)", numbers),
                (f"range({start}, {stop}, {step})", list(range(start, stop, step))),
                (f"range({start},{stop})", list(range(start, stop))),
                *([(f"range({count})", list(range(count)))] if least == 0 else []),
            ]
        )
    )


def test_numbers_lists_and_ranges_are_multiplied():
    text = "# prompt\n(1, [128, 256], 0)\n\n  (range(2, 6, 2), 512, range(2))  # and more\n(4, 1, (256, 512))\n"
    assert parse(text, "buckets.txt") == [
        FileBucket(1, 128, 0, 2, 1),
        FileBucket(1, 256, 0, 2, 1),
        FileBucket(2, 512, 0, 4, 3),
        FileBucket(2, 512, 1, 4, 3),
        FileBucket(4, 512, 0, 4, 3),
        FileBucket(4, 512, 1, 4, 3),
        FileBucket(4, 1, 256, 5, 1),
        FileBucket(4, 1, 512, 5, 1),
    ]


@pytest.mark.parametrize(
    "text", ["(1, 2, 3)", "1, 2, 3", "(1,2,3,)", "\t(1, 2, 3)\r\n", "((1), [2], (3,))", "(1,2,3)#"]
)
def test_spellings_of_one_bucket(text):
    (bucket,) = parse(text, "buckets.txt")
    assert bucket[:3] == (1, 2, 3)


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_lines_are_counted_with_any_ending(ending):
    found = parse(ending.join(["(1, 2, 3)", "", "(4, 5, 6)"]), "buckets.txt")
    assert [bucket.line for bucket in found] == [1, 3]


def test_a_text_without_specs_lists_nothing():
    assert parse("", "buckets.txt") == parse("\n \n# only words\n", "buckets.txt") == []


@PROPERTY
@given(st.lists(st.tuples(axes(1), axes(1), axes(0)), max_size=4))
def test_every_spec_stands_for_the_product_of_its_axes(specs):
    text = "\n".join(f"({batch}, {query}, {context})" for (batch, _), (query, _), (context, _) in specs)
    expected = [
        (*numbers, line) for line, spec in enumerate(specs, 1) for numbers in product(*(axis for _, axis in spec))
    ]
    assert [bucket[:4] for bucket in parse(text, "buckets.txt")] == expected


@pytest.mark.parametrize(
    ("line", "column", "message"),
    [
        ("(1, 2, 3", 1, "'(' was never closed; write (batch, query, context)"),
        ("(1, 2, 3))", 10, "unmatched ')'"),
        ("(1, 2)", 1, "this has 2 entries instead of 3"),
        ("  (1, 2, 3, 4)", 3, "this has 4 entries instead of 3"),
        ("(1, 2, 3),", 1, "this has 1 entries instead of 3"),
        ("[1, 2, 3]", 1, "this is not a bucket"),
        ("7", 1, "this is not a bucket"),
        ("(1, 2, 3) (4, 5, 6)", 1, "this is not a bucket"),
        ("(1, x, 3)", 5, "'x' is not allowed in a bucket"),
        ("  (1, '2', 3)", 7, '"\'" is not allowed in a bucket'),
        ("(1, 2.5, 3)", 6, "'.' is not allowed in a bucket"),
        ("(1, __import__('os'), 3)", 7, "'i' is not allowed in a bucket"),
        ("(1, 2, 3)\x00", 10, "'\\x00' is not allowed in a bucket"),
        ("(é, 2, 3)", 2, "'é' is not allowed in a bucket"),
        ("(1, _, 3)", 5, "this is not a number"),
        ("(1, range, 3)", 5, "this is not a number"),
        ("(1, [2, [3]], 3)", 9, "this is not a number"),
        ("(1, 4 - 2, 3)", 5, "this is not a number"),
        ("(1, [2, 3][0], 3)", 5, "this is not a number"),
        ("(1, -2, 3)", 5, "the query must not be negative"),
        ("(1, 2, [0, -1])", 12, "the context must not be negative"),
        ("(0, 2, 3)", 2, "batch 0 must be at least 1"),
        ("(1, [2, 0], 3)", 9, "query 0 must be at least 1"),
        ("(1, 007, 3)", 5, "number 007 has leading zeros"),
        ("(1, 2_, 3)", 6, "invalid decimal literal"),
        (f"(1, {MAX_NUMBER + 1}, 3)", 5, f"this query is above {MAX_NUMBER}"),
        ("(1, " + "9" * 5000 + ", 3)", 5, f"this number is above {MAX_NUMBER}"),
        ("(1, [], 3)", 5, "this list gives the query no value"),
        ("((), 2, 3)", 2, "this list gives the batch no value"),
        ("(1, range(5, 5), 3)", 5, "range(5, 5, 1) gives the query no value"),
        ("(1, range(0), 3)", 5, "range(0, 0, 1) gives the query no value"),
        ("(1, range(0, 5), 3)", 5, "query 0 must be at least 1; start the range there"),
        ("(1, range(1, 5, 0), 3)", 17, "query step 0 must be at least 1"),
        ("(1, range(5, 1, -1), 3)", 17, "the query step must not be negative"),
        ("(1, range(-5, 1), 3)", 11, "the query must not be negative"),
        ("(1, range(), 3)", 5, "this is not a range; write the query as range(start, stop, step)"),
        ("(1, range(1, 2, 3, 4), 3)", 5, "this is not a range"),
        ("(1, (2)(3), 3)", 5, "this is not a range"),
        ("(1, range([2]), 3)", 11, "this is not a number"),
        ("(" * 300, 201, "too many nested parentheses"),
        ("-" * 9000 + "1", 1, "this is nested too deeply"),
        ("(1, " + "-" * 9000 + "1, 3)", 1, "this is nested too deeply"),
        ("range(1)" + "(1)" * 3000, 1, "this is nested too deeply"),
        ("0" * (MAX_LINE + 1), MAX_LINE + 1, f"more than {MAX_LINE} characters"),
    ],
)
def test_an_error_names_its_line_and_column(line, column, message):
    with pytest.raises(InputError, match="^" + re.escape(f"buckets.txt:2:{column}: {message}")):
        parse(f"(1, 2, 3)\n{line}\n", "buckets.txt")


def test_the_largest_number_and_the_longest_line_are_read():
    line = f"(1, {MAX_NUMBER}, 0)".ljust(MAX_LINE, " ")
    assert parse(line + "\n", "buckets.txt")[0].query == MAX_NUMBER


@pytest.mark.parametrize(
    "text",
    [f"(1, range(1, {MAX_BUCKETS + 2}), 0)", f"(1, 2, 3)\n({MAX_BUCKETS}, range(1, {MAX_BUCKETS + 1}), 0)"],
)
def test_more_buckets_than_a_plan_may_have_are_refused_before_they_are_built(text):
    with pytest.raises(InputError, match=f"make more than {MAX_BUCKETS} in all; list fewer"):
        parse(text, "buckets.txt")


def test_as_many_buckets_as_a_plan_may_have_are_read():
    assert len(parse(f"(range(1, 5), range(1, {MAX_BUCKETS // 4 + 1}), 0)", "buckets.txt")) == MAX_BUCKETS


def test_a_text_that_is_no_bucket_file_by_its_size_is_refused():
    with pytest.raises(InputError, match=f"buckets.txt: has more than {MAX_FILE} characters"):
        parse("\n" * (MAX_FILE + 1), "buckets.txt")


@PROPERTY
@given(st.text() | SMALL_ALPHABET)
@example("\ud800")
@example("(1, 2, 3)\x0c\x1c\u2028(4, 5, 6)")
@example("1or 2")
@example("(1)(2)")
def test_no_text_raises_anything_but_input_errors(text):
    try:
        found = parse(text, "buckets.txt")
    except InputError as error:
        assert re.match(r"buckets\.txt:[1-9][0-9]*:[1-9][0-9]*: ", str(error))
    else:
        assert all(bucket.batch >= 1 and bucket.query >= 1 and bucket.context >= 0 for bucket in found)


@PROPERTY
@given(
    st.lists(st.tuples(st.integers(0, 22), st.booleans(), st.sampled_from(["", *"()[],-012 ", "range"])), max_size=3)
)
@example([])
@example([(22, False, "")])
def test_what_is_accepted_means_what_python_says_it_means(changes):
    tokens = [
        "(",
        "1",
        ",",
        "[",
        "2",
        ",",
        "30",
        "]",
        ",",
        "range",
        "(",
        "4",
        ",",
        "9",
        ",",
        "2",
        ")",
        ")",
        *([""] * 5),
    ]
    for position, insert, token in changes:
        tokens[position] = tokens[position] + token if insert else token
    try:
        found = parse("".join(tokens), "buckets.txt")
    except InputError:
        return
    spec = eval("".join(tokens).strip() or "()", {"range": range, "__builtins__": {}})
    values = [axis if isinstance(axis, range | list | tuple) else [axis] for axis in spec]
    assert [bucket[:3] for bucket in found] == (list(product(*values)) if values else [])


def test_query_one_is_decode_and_any_other_is_prompt():
    found, notes = bucket_file.buckets("(4, 1, 512)\n(2, [256, 128], [0, 128])\n", "buckets.txt", LIMITS, "tokens")
    assert found == [
        Bucket("decode", 4, 1, 512),
        Bucket("prompt", 2, 128, 0),
        Bucket("prompt", 2, 128, 128),
        Bucket("prompt", 2, 256, 0),
        Bucket("prompt", 2, 256, 128),
    ]
    assert notes == []


def test_blocks_of_a_whole_decode_batch_become_tokens_of_one_sequence():
    text = "(2, 256, [0, 3])\n(4, 1, [0, 1, 8, 9])\n(1, 1, 5)\n"
    found, notes = bucket_file.buckets(text, "buckets.txt", LIMITS, "blocks")
    assert found == [
        Bucket("decode", 1, 1, 5 * 128),
        Bucket("decode", 4, 1, 0),
        Bucket("decode", 4, 1, 128),
        Bucket("decode", 4, 1, 256),
        Bucket("decode", 4, 1, 384),
        Bucket("prompt", 2, 256, 0),
        Bucket("prompt", 2, 256, 384),
    ]
    assert notes == []


def test_buckets_that_only_the_conversion_makes_equal_are_kept_once_and_counted():
    found, notes = bucket_file.buckets("(4, 1, range(5, 9))\n(1, 256, 0)\n", "buckets.txt", LIMITS, "blocks")
    assert found == [Bucket("decode", 4, 1, 256), Bucket("prompt", 1, 256, 0)]
    text = "equal to another one of the file once its blocks are counted in tokens per sequence"
    assert notes == [Note("dropped", text, "decode", 3)]


def test_blocks_are_cut_at_max_model_len_and_a_warning_says_where_that_is_more_than_rounding():
    limits = Limits(1000, 8, 4096, 128)
    found, notes = bucket_file.buckets("(1, 1, 8)\n(1, 256, 8)\n", "buckets.txt", limits, "blocks")
    assert found == [Bucket("decode", 1, 1, 1000), Bucket("prompt", 1, 256, 1000)]
    assert notes == []
    found, notes = bucket_file.buckets("(1, 1, [9, 50])\n(1, 256, 9)\n", "buckets.txt", limits, "blocks")
    assert found == [Bucket("decode", 1, 1, 1000), Bucket("prompt", 1, 256, 1000)]
    assert [str(note) for note in notes if note.phase == "prompt"] == [
        "warning: 1 in the bucket file with a context above max_model_len 1000, cut to it"
    ]
    assert [note.count for note in notes if note.phase == "decode"] == [1, 0]


@PROPERTY
@given(st.integers(1, 8), st.integers(0, 100), st.integers(1, 256), st.integers(256, 2000))
def test_converted_decode_contexts_hold_the_batch_and_padding_less_than_a_block_a_sequence(batch, blocks, size, length):
    limits = Limits(length, 8, None, size)
    found, _ = bucket_file.buckets(f"({batch}, 1, {blocks})\n(1, 2, 0)", "buckets.txt", limits, "blocks")
    context = found[0].context
    assert context <= length
    if context < length:
        assert context % size == 0
        assert batch * context >= blocks * size > batch * (context - size)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("(9, 1, 512)", "(9, 1, 512): batch 9 is above max_num_seqs 8; lower it or raise the limit"),
        ("(1, 1025, 0)", "(1, 1025, 0): query 1025 is above max_model_len 1024"),
        ("(1, 128, 1025)", "(1, 128, 1025): context 1025 is above max_model_len 1024"),
        ("(1, 1, 1025)", "(1, 1, 1025): context 1025 is above max_model_len 1024"),
        ("(8, 640, 0)", "(8, 640, 0): batch*query 5120 is above max_num_batched_tokens 4096"),
        ("(8, 1, 1024)", "(8, 1, 1024) is listed before, in line 1; remove one of the two"),
        ("(1, [128, 128], 0)", "(1, 128, 0) is listed before, in line 2; remove one of the two"),
    ],
)
def test_a_bucket_that_cannot_be_planned_is_named_with_its_place(line, message):
    with pytest.raises(InputError, match=re.escape(f"buckets.txt:2:2: {message}")):
        bucket_file.buckets(f"{DECODE} {line}\n(1, 64, 0)\n", "buckets.txt", LIMITS, "tokens")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(1, 128, 0)", "buckets.txt: lists no decode bucket; add one, with query 1"),
        (DECODE, "buckets.txt: lists no prompt bucket; add one, with a query above 1"),
        ("", "buckets.txt: lists no prompt bucket"),
    ],
)
def test_a_phase_without_buckets_is_named(text, message):
    with pytest.raises(InputError, match=re.escape(message)):
        bucket_file.buckets(text, "buckets.txt", LIMITS, "tokens")


def test_a_unit_that_is_none_is_refused():
    with pytest.raises(InputError, match="unit 'pages' is not one of tokens, blocks"):
        bucket_file.buckets(DECODE, "buckets.txt", LIMITS, "pages")


def test_a_file_is_loaded_with_its_path_in_messages(tmp_path):
    path = tmp_path / "buckets.txt"
    path.write_bytes(b"\xef\xbb\xbf(1, 128, 0)\r\n(8, 1, 1024)\r\n")
    expected = [Bucket("decode", 8, 1, 1024), Bucket("prompt", 1, 128, 0)]
    assert bucket_file.load(path, LIMITS, "tokens") == (expected, [])
    assert bucket_file.load(str(path), LIMITS, "tokens") == (expected, [])
    path.write_text("(1, 128, x)")
    with pytest.raises(InputError, match=re.escape(f"{path}:1:10: 'x' is not allowed")):
        bucket_file.load(path, LIMITS, "tokens")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(InputError, match=r"cannot read the bucket file .*missing: .*No such file"):
        bucket_file.load(tmp_path / "missing", LIMITS, "tokens")
    with pytest.raises(InputError, match=r"cannot read the bucket file .*Is a directory"):
        bucket_file.load(tmp_path, LIMITS, "tokens")
    with pytest.raises(InputError, match="cannot read the bucket file"):
        bucket_file.load("nul\0byte", LIMITS, "tokens")
    (tmp_path / "binary").write_bytes(b"(1, 128, 0)\xff")
    with pytest.raises(InputError, match=r"cannot read the bucket file .*binary: .*utf-8"):
        bucket_file.load(tmp_path / "binary", LIMITS, "tokens")


def test_a_file_that_is_too_large_is_not_read_to_its_end(tmp_path):
    path = tmp_path / "buckets.txt"
    path.touch()
    os.truncate(path, MAX_FILE + 2)
    with pytest.raises(InputError, match=f"has more than {MAX_FILE} bytes"):
        bucket_file.load(path, LIMITS, "tokens")


VENDORS = "(1, 2048, 0)\n(1, [256, 512], [0, 4, 8])\n(64, 1, 1024)\n(32, 1, 512)\n(1, 1, 64)\n"
"""In the form of the vendor's sample: prompt contexts of 4 and 8 blocks, decode contexts of all blocks of a batch."""


@pytest.mark.parametrize(
    ("text", "limits", "context"),
    [
        ("(1, 128, 0)\n(64, 1, 8192)\n", Limits(2048, 64, None, 16), 2048),  # more tokens than a sequence has
        ("(1, 128, 0)\n(64, 1, [1024, 16384])\n", Limits(8192, 64), 8192),
        ("(1, 128, [0, 128])\n(8, 1, [512, 1024])\n", LIMITS, 1024),  # as blocks: 128 tokens for each token there is
        ("(1, 128, 0)\n(8, 1, 1023)\n", LIMITS, 1023),  # all that is ever cached
    ],
)
def test_a_unit_that_the_numbers_leave_no_doubt_of_is_recognised(text, limits, context):
    found, _ = bucket_file.buckets(text, "buckets.txt", limits, None)
    assert max(bucket.context for bucket in found) == context


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        (VENDORS, Limits(8192, 64)),
        (VENDORS, Limits(4096, 64)),
        ("(1, 128, 0)\n(1, 1, 256)\n", Limits(4096, 1)),  # as blocks beyond the limit, as tokens far below it
        ("(1, 128, 0)\n(128, 1, 8192)\n", Limits(8192, 128)),  # 64 blocks or 8,192 tokens: both the whole sequence
        ("(1, 128, 0)\n(4, 1, 4096)\n", LIMITS),  # beyond the limit either way
    ],
)
def test_a_unit_that_could_be_either_is_requested(text, limits):
    with pytest.raises(InputError, match=r"^buckets\.txt: its contexts may count tokens .* --context-unit tokens, or"):
        bucket_file.buckets(text, "buckets.txt", limits, None)
    found, _ = bucket_file.buckets(text, "buckets.txt", limits, "blocks")
    assert max(bucket.context for bucket in found) > 1
