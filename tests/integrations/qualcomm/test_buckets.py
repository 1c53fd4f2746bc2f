"""Qualcomm's compute context lengths: of prefill chunks and of decode steps, never the same number in both."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from llmc.buckets.planner.planner import make_plan
from llmc.errors import InputError
from llmc.integrations import bucket_rules
from llmc.integrations.base import Export, Pick, Setup
from llmc.integrations.settings import Value
from tests.integrations import judging
from tests.integrations.judging import shapes, values
from tests.tiers import full

QAIC = bucket_rules("qualcomm")


def setup(length: int = 8192, seqs: int = 4, **own: Value) -> Setup:
    return judging.setup(QAIC, {"max_model_len": length, "max_num_seqs": seqs}, own)


def accepted(built: Setup, prefill: list[int], decode: list[int]) -> tuple[list[int], list[int]]:
    lists = QAIC.accept(built, {"prefill": shapes(*prefill), "decode": shapes(*decode)}).lists
    return values(lists["prefill"]), values(lists["decode"])


def config(**lists: object) -> Export:
    return Export(arguments=(f"--additional-config {json.dumps({'override_qaic_config': lists})}",))


def test_its_own_lists_are_the_longest_context() -> None:
    assert QAIC.default(setup()) == {"prefill": shapes(8192), "decode": shapes(8192)}
    assert QAIC.accept(setup(), QAIC.default(setup())).lists == QAIC.default(setup())
    assert QAIC.graphs(setup(), {"prefill": shapes(1024, 8191), "decode": shapes(2048, 8192)}) == 4


@pytest.mark.parametrize(
    ("length", "prefill", "decode", "expected"),
    [
        (8192, [2048, 4096], [4096, 8192], ([2048, 4095, 8191], [4096, 8192])),
        (8192, [256, 500], [512, 1024], ([1023, 8191], [1024, 8192])),
        (8192, [8191], [8192], ([8191], [8192])),
        (8192, [4095, 4096], [4096], ([4094, 4095, 8191], [4096, 8192])),
        (512, [256], [512], ([511], [512])),
    ],
)
def test_what_the_compiler_is_given(
    length: int, prefill: list[int], decode: list[int], expected: tuple[list[int], list[int]]
) -> None:
    assert accepted(setup(length), prefill, decode) == expected


def test_what_was_changed_is_said() -> None:
    found = QAIC.accept(setup(), {"prefill": shapes(256, 4096), "decode": shapes(4096)})
    assert {(drop.family, drop.shape) for drop in found.dropped} == {("prefill", (256,)), ("prefill", (4096,))}
    assert set(found.added) == {
        ("prefill", (1024,)), ("prefill", (4095,)), ("prefill", (8191,)), ("decode", (8192,)),
    }  # fmt: skip


def test_chunks_of_one_token_share_one_list() -> None:
    built = setup(prefill_seq_len=1)
    assert accepted(built, [2048], [4096]) == ([2048, 4096, 8192], [2048, 4096, 8192])


def test_lists_that_the_server_would_ignore_are_refused() -> None:
    with pytest.raises(InputError, match="comp_ctx_lengths_decode 9000 is above max_model_len 8192"):
        accepted(setup(), [1024], [9000])
    with pytest.raises(InputError, match="comp_ctx_lengths_prefill is empty"):
        accepted(setup(), [], [2048])
    with pytest.raises(InputError, match="8191 leaves no prefill length"):
        accepted(setup(), [1024], [8191])
    with pytest.raises(InputError, match="push prefill lengths below 1024"):
        accepted(setup(), [1024, 1025], [1025])


def test_a_step_runs_chunks_and_a_decode_of_all_rows() -> None:
    assert judging.steps(QAIC, setup(seqs=2), (0.0, 200, 3), (0.0, 100, 2)) == [
        ("prefill", 128, 1, 128), ("prefill", 100, 1, 100),
        ("prefill", 200, 1, 200), ("decode", 101, 1, 101),
        ("decode", 201, 1, 201), ("decode", 202, 1, 202),
    ]  # fmt: skip
    assert QAIC.work(setup(seqs=4), "decode", (1024,)) == 4096
    assert QAIC.work(setup(seqs=4), "prefill", (1024,)) == 1024


def test_the_next_length_above_is_taken() -> None:
    finder = QAIC.finder(setup(), "decode", shapes(1024, 8192))
    assert [finder.find((n,)) for n in (1024, 1025, 8193)] == [
        Pick((1024,)),
        Pick((8192,)),
        Pick((8193,), "error"),
    ]


@full
@given(
    st.sets(st.integers(1, 8192), min_size=1, max_size=10),
    st.sets(st.integers(1, 8192), min_size=1, max_size=10),
    st.sampled_from([1, 128]),
)
def test_what_is_written_is_read(prefill: set[int], decode: set[int], chunk: int) -> None:
    built = setup(prefill_seq_len=chunk)
    try:
        lists = QAIC.accept(built, {"prefill": shapes(*sorted(prefill)), "decode": shapes(*sorted(decode))}).lists
    except InputError:
        reject()
    assert QAIC.accept(built, lists).lists == lists
    judging.written_is_read(QAIC, built, lists)


def test_its_own_lists_are_written_as_none() -> None:
    written = judging.written_is_read(QAIC, setup(), QAIC.default(setup()))
    assert json.loads(written.files["config.json"]) == {}


@pytest.mark.parametrize(
    ("lists", "match"),
    [
        ({"comp_ctx_lengths_prefill": [9000]}, "9000 is above"),
        ({"comp_ctx_lengths_prefill": []}, "must be a list of whole numbers"),
        ({"comp_ctx_lengths_prefill": "1024,x"}, "must be whole numbers above 0"),
        ({"comp_ctx_lengths_decode": [True]}, "must be a list of whole numbers"),
        ({"comp_ctx_lengths_decode": [0]}, "must be a list of whole numbers above 0"),
    ],
)
def test_a_configuration_that_the_server_refuses_is_an_error(lists: dict[str, object], match: str) -> None:
    with pytest.raises(InputError, match=match):
        QAIC.read(config(**lists), setup())


def test_one_list_alone_and_numbers_with_commas() -> None:
    found = QAIC.read(config(comp_ctx_lengths_decode="4096,2048"), setup())
    assert found == {"prefill": shapes(8191), "decode": shapes(2048, 4096, 8192)}


def test_the_log_of_a_compilation_has_the_lists() -> None:
    lines = ["CCL Configuration:", "  - Prefill context lengths: [2016, 8191]", "  - Decode context lengths: [8192]"]
    assert QAIC.read_log(lines) == {"prefill": shapes(2016, 8191), "decode": shapes(8192)}
    assert QAIC.read_log(lines[:2]) is None


@given(
    st.dictionaries(st.integers(1, 6143), st.integers(1, 9), min_size=1, max_size=10), st.integers(2, 5),
    st.sampled_from([1, 128]),
)  # fmt: skip
def test_a_proposal_pads_no_more_than_any_other(counts: dict[int, int], most: int, chunk: int) -> None:
    built = setup(6144, prefill_seq_len=chunk)
    demands = {family: judging.counted(family, counts) for family in ("prefill", "decode")}
    chosen = QAIC.propose(built, demands, dict.fromkeys(demands, most))
    assert QAIC.accept(built, chosen).lists == chosen
    assert all(len(chosen[family]) <= most for family in demands)
    if chunk == 1:
        everything = {**demands["prefill"], **demands["decode"]}
        best = judging.best(QAIC, built, everything, range(1024, 6145, 1024), most)
        assert judging.padded(QAIC, built, everything, chosen["decode"]) == best
        return
    candidates = {"decode": range(1024, 6145, 1024), "prefill": [1023, 2016, 3040, 4064, 5088, 6143]}
    if (1024,) not in chosen["decode"]:
        candidates["prefill"] = [1024, 2016, 3040, 4064, 5088, 6143]
    for family, steps in demands.items():
        work = judging.padded(QAIC, built, steps, chosen[family])
        assert work == judging.best(QAIC, built, steps, candidates[family], most)


def test_a_plan_becomes_lengths() -> None:
    built = setup(2048)
    lists = QAIC.from_plan(built, make_plan(built.limits))
    assert QAIC.accept(built, lists).lists == lists
