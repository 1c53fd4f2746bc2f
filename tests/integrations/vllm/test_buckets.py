"""vLLM's capture sizes: its own list, what it makes of a list from outside, and what it says of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.step_time import AssumedStepTime
from llmc.errors import InputError
from llmc.integrations import bucket_rules
from llmc.integrations.base import Export, GraphDemand, Pick, Setup, Shape
from llmc.integrations.configuration import load
from llmc.integrations.settings import Value, complete
from tests.integrations import judging

VLLM = bucket_rules("vllm")
MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


def setup(max_num_seqs: int = 256, max_num_batched_tokens: int = 8192, **own: Value) -> Setup:
    limits = {"max_model_len": 8192, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    return Setup(VLLM.limits(limits), complete(VLLM.settings, own))


def of_v1(**own: Value) -> Setup:
    return setup(8, 64, release="0.24", **own)


def sizes(shapes: tuple[Shape, ...]) -> list[int]:
    return [size for (size,) in shapes]


@pytest.mark.parametrize(
    ("built", "first", "last", "count"),
    [
        (setup(), [1, 2, 4, 8, 16], 512, 51),
        (setup(8), [1, 2, 4, 8, 16], 16, 5),
        (setup(1), [1, 2], 2, 2),
        (setup(128), [1, 2, 4, 8], 256, 35),
        (setup(256, 300), [1, 2, 4, 8], 300, 38),
        (setup(performance_mode="interactivity"), [1, 2, 3, 4, 5, 6, 7, 8, 9], 512, 76),
        (setup(8, release="0.24", enable_sp=True, tensor_parallel_size=4), [4, 8, 16], 16, 3),
        (setup(8, release="0.24", num_speculative_tokens=2, cudagraph_mode="PIECEWISE"), [1, 2, 4, 8], 48, 9),
        (setup(max_cudagraph_capture_size=8192), [1, 2, 4], 8192, 531),
        (setup(8, release="0.24", num_speculative_tokens=2), [3, 6, 9, 18], 48, 8),
        (setup(8, release="0.29", num_speculative_tokens=2), [1, 2, 3, 4, 6, 8, 12, 16, 24], 48, 12),
        (setup(8, num_speculative_tokens=2, use_v2_model_runner=False), [3, 6, 9, 12, 18, 24], 48, 9),
        (setup(30), [1, 2, 4, 8, 16, 24, 30, 32], 56, 11),
        (setup(30, release="0.30"), [1, 2, 4, 8, 16, 24, 32], 56, 10),
        (setup(blackwell=True), [1, 2, 4], 512, 51),
        (setup(512, blackwell=True), [1, 2, 4], 1024, 83),
        (setup(512, blackwell=True, release="0.27"), [1, 2, 4], 512, 51),
        (setup(256, 300, release="0.20"), [1, 2, 4, 8], 288, 37),
    ],
)
def test_its_own_list(built: Setup, first: list[int], last: int, count: int) -> None:
    found = sizes(VLLM.default(built)["tokens"])
    assert (found[: len(first)], found[-1], len(found)) == (first, last, count)


def test_a_list_is_cut_at_the_tokens_of_a_step_and_rounded_to_drafts() -> None:
    accepted = VLLM.accept(of_v1(num_speculative_tokens=2), {"tokens": ((1,), (8,), (30,), (64,), (65,))})
    assert sizes(accepted.lists["tokens"]) == [3, 9, 30]
    assert {drop.shape for drop in accepted.dropped} == {(1,), (8,), (64,), (65,)}
    with pytest.raises(InputError, match="at or below max_num_batched_tokens 64"):
        VLLM.accept(setup(8, 64), {"tokens": ((65,),)})


def test_drafts_leave_sizes_as_they_are_where_no_decode_step_has_a_full_graph() -> None:
    built = setup(8, 64, num_speculative_tokens=2, cudagraph_mode="PIECEWISE")
    assert sizes(VLLM.accept(built, {"tokens": ((1,), (8,))}).lists["tokens"]) == [1, 8]


def test_a_list_below_one_drafted_step_is_refused() -> None:
    with pytest.raises(InputError, match="a drafted step has 5 tokens, more than the largest size 4"):
        VLLM.accept(of_v1(num_speculative_tokens=4), {"tokens": ((1,), (4,))})


def test_sequence_parallelism_keeps_multiples_of_its_devices() -> None:
    built = setup(8, release="0.31", enable_sp=True, tensor_parallel_size=4)
    accepted = VLLM.accept(built, {"tokens": ((2,), (8,), (12,))})
    assert sizes(accepted.lists["tokens"]) == [8, 12]
    assert [drop.reason for drop in accepted.dropped] == ["not a multiple of tensor_parallel_size 4"]
    with pytest.raises(InputError, match="that is a multiple of tensor_parallel_size 4; give one"):
        VLLM.accept(built, {"tokens": ((2,), (3,))})
    with pytest.raises(InputError, match=r"no size is a multiple of both 3 .* and 4"):
        VLLM.accept(of_v1(enable_sp=True, tensor_parallel_size=4, num_speculative_tokens=2), {"tokens": ((12,),)})


def test_sequence_parallelism_is_refused_where_vllm_no_longer_has_it() -> None:
    with pytest.raises(InputError, match=r"enable_sp does not exist from release 0\.32 on"):
        VLLM.default(setup(8, enable_sp=True, tensor_parallel_size=4))


@pytest.mark.parametrize("release", ["", "v0.24", "0", "newest"])
def test_what_is_no_release_is_refused(release: str) -> None:
    with pytest.raises(InputError, match=r"is not a release; write it as 0\.24"):
        VLLM.default(setup(8, release=release))


def test_model_runner_v2_keeps_sizes_and_rounds_the_graphs_of_decode_steps() -> None:
    built = setup(8, 64, num_speculative_tokens=2)
    accepted = VLLM.accept(built, {"tokens": ((1,), (8,), (30,), (64,), (65,))})
    assert sizes(accepted.lists["tokens"]) == [1, 8, 30, 64]
    assert VLLM.graphs(built, accepted.lists) == 4 + 2  # decode graphs of 3 and 9 tokens; 30 and 66 are more than 24


def test_no_mode_no_graphs() -> None:
    built = setup(8, cudagraph_mode="NONE")
    assert VLLM.default(built) == {"tokens": ()}
    assert VLLM.graphs(built, {"tokens": ()}) == 0
    for use in (lambda: VLLM.accept(built, {"tokens": ((8,),)}), lambda: VLLM.propose(built, {}, {"tokens": 8})):
        with pytest.raises(InputError, match="cudagraph_mode"):
            use()


def test_graphs_of_decode_steps_alone_serve_no_more_than_max_num_seqs_can_fill() -> None:
    built = setup(10, cudagraph_mode="FULL_DECODE_ONLY")
    finder = VLLM.finder(built, "tokens", ((4,), (8,), (16,)))
    assert [finder.find((n,)) for n in (3, 8, 9)] == [Pick((4,)), Pick((8,)), Pick((9,), "eager")]
    assert VLLM.propose(built, {}, {"tokens": 4}) == {"tokens": ((10,),)}


def test_only_steps_that_a_list_can_serve_are_requested() -> None:
    requests = [TrafficRequest(0, 100, 4), TrafficRequest(0, 7, 3)]
    steps = {mode: list(VLLM.demands(setup(8, cudagraph_mode=mode), requests, AssumedStepTime())) for mode in MODES}
    assert steps["FULL_AND_PIECEWISE"] == [
        GraphDemand("tokens", (107,), 1, 107), GraphDemand("tokens", (2,), 2, 4), GraphDemand("tokens", (1,), 1, 1),
    ]  # fmt: skip
    assert steps["FULL_DECODE_ONLY"] == steps["FULL_AND_PIECEWISE"][1:]
    assert steps["NONE"] == []


def test_drafts_are_tokens_of_each_decoding_sequence() -> None:
    requests = [TrafficRequest(0, 5, 2), TrafficRequest(0, 5, 2)]
    found = list(VLLM.demands(setup(8, num_speculative_tokens=3), requests, AssumedStepTime()))
    assert [demand.shape for demand in found] == [(10,), (8,)]


@pytest.mark.parametrize(
    ("given_limits", "seqs", "tokens"),
    [({}, 256, 2048), ({"max_num_seqs": 2}, 2, 200), ({"max_num_batched_tokens": 64}, 64, 64)],
)
def test_limits_that_are_not_given(given_limits: dict[str, int], seqs: int, tokens: int) -> None:
    limits = VLLM.limits({"max_model_len": 100, **given_limits})
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (seqs, tokens)


def test_more_sequences_than_tokens_of_a_step_are_refused() -> None:
    with pytest.raises(InputError, match="max_num_batched_tokens 2048 is below max_num_seqs 4096"):
        VLLM.limits({"max_model_len": 8192, "max_num_seqs": 4096})


def test_the_next_size_above_is_taken_and_a_larger_step_runs_eagerly() -> None:
    finder = VLLM.finder(setup(), "tokens", ((4,), (16,)))
    assert [finder.find((n,)) for n in (1, 4, 5, 17)] == [
        Pick((4,)), Pick((4,)), Pick((16,)), Pick((17,), "eager"),
    ]  # fmt: skip


def test_graphs_count_decode_steps_apart() -> None:
    lists = {"tokens": ((1,), (8,), (64,))}
    counts = {mode: VLLM.graphs(setup(8, cudagraph_mode=mode), lists) for mode in MODES}
    assert counts == {"NONE": 0, "PIECEWISE": 3, "FULL": 3, "FULL_DECODE_ONLY": 2, "FULL_AND_PIECEWISE": 5}


@given(st.sets(st.integers(1, 2048), min_size=1, max_size=40), st.integers(0, 4))
def test_what_is_written_is_read(given_sizes: set[int], drafts: int) -> None:
    built = setup(num_speculative_tokens=drafts)
    lists = VLLM.accept(built, {"tokens": tuple((n,) for n in sorted(given_sizes | {8}))}).lists
    written = VLLM.export(built, lists)
    assert VLLM.read(written, built) == lists
    assert json.loads(written.files["config.yaml"].split("'")[1])["cudagraph_capture_sizes"] == sizes(lists["tokens"])


@pytest.mark.parametrize(
    "text",
    [
        '{"cudagraph_capture_sizes": []}',
        '{"cudagraph_capture_sizes": "1 2"}',
        '{"cudagraph_capture_sizes": [0]}',
        "{",
        "[]",
    ],
)
def test_a_flag_that_vllm_refuses_is_an_error(text: str) -> None:
    with pytest.raises(InputError, match="--compilation-config"):
        VLLM.read(Export(arguments=(f"--compilation-config {text}",)), setup())


@pytest.mark.parametrize(
    ("arguments", "files", "expected"),
    [
        (["--cudagraph-capture-sizes 4 2 1"], {}, [1, 2, 4]),
        (["--cudagraph_capture_sizes=1"], {}, [1]),
        (["--cuda-graph-sizes 24"], {}, [1, 2, 4, 8, 16, 24]),
        (["--cuda-graph-sizes 24 3"], {}, [3, 24]),
        (['-O {"cudagraph_capture_sizes": [2, 8]}'], {}, [2, 8]),
        (['-cc={"cudagraph_capture_sizes": [2, 8]}', "-O3"], {}, [2, 8]),
        (["-O.cudagraph_capture_sizes [2,8]"], {}, [2, 8]),
        (["--compilation_config.cudagraph_capture_sizes+ 2,8", "-O 2"], {}, [2, 8]),
        (["-cc.cudagraph_capture_sizes+=2", "--compilation-config.pass_config.enable_sp=false"], {}, [2]),
        (["--compilation-config", '{"cudagraph_capture_sizes":', "[2, 8]}"], {}, [2, 8]),
        ([], {"c.yaml": "max-num-seqs: 8\ncompilation-config:\n  cudagraph_capture_sizes: [2, 8]\n"}, [2, 8]),
        ([], {"c.yaml": "compilation_config: '{\"cudagraph_capture_sizes\": [2]}'"}, [2]),
        ([], {"c.yaml": "cudagraph-capture-sizes: [8, 4]"}, [4, 8]),
        (["--cudagraph-capture-sizes 1 8", "--max-cudagraph-capture-size 8"], {}, [1, 8]),
        (["--port 8000"], {"c.json": "{}"}, [1, 2, 4, 8, 16]),
    ],
)
def test_every_spelling_of_a_list(arguments: list[str], files: dict[str, str], expected: list[int]) -> None:
    assert sizes(VLLM.read(Export(arguments=tuple(arguments), files=files), setup(8))["tokens"]) == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cudagraph-capture-sizes 1 2", "--cuda-graph-sizes 1 2"], "both state a list"),
        (["--max-num-seqs 9"], "--max-num-seqs 9 disagrees with max_num_seqs 8"),
        (["--enforce-eager"], "--enforce-eager: vLLM runs without graphs"),
        (["-O0"], "-O0 changes which steps have graphs"),
        (["-O 1"], "-O1 changes which steps have graphs"),
        (["--compilation-config.a=1", "--compilation-config.a.b=1"], "--compilation-config has no object there"),
        (["--cudagraph-capture-sizes one"], "--cudagraph-capture-sizes must be whole numbers"),
        (["--cudagraph-capture-sizes 1 2", "--max-cudagraph-capture-size 4"], "4 is not the largest"),
        (['-O {"cudagraph_capture_sizes": [1], "max_cudagraph_capture_size": 2}'], "2 is not the largest"),
    ],
)
def test_flags_that_disagree_are_an_error(arguments: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        VLLM.read(Export(arguments=tuple(arguments)), setup(8))


def test_the_last_word_of_the_log_counts() -> None:
    lines = [
        'compilation_config={"level":3,"cudagraph_capture_sizes":[16,8,4],"x":1}',
        "cudagraph_capture_sizes specified in compilation_config [4, 8, 9999] is overridden by config [4, 8]",
    ]
    assert VLLM.read_log(lines) == {"tokens": ((4,), (8,))}
    assert VLLM.read_log(["'cudagraph_capture_sizes': []"]) is None


def test_the_log_of_a_start_has_the_list() -> None:
    lines = ["INFO Loading", "compilation_config={'mode': 3, 'cudagraph_capture_sizes': [4, 2, 1], 'x': 1}"]
    assert VLLM.read_log(lines) == {"tokens": ((1,), (2,), (4,))}
    assert VLLM.read_log(lines[:1]) is None


@given(
    st.dictionaries(st.integers(1, 12), st.integers(1, 9), min_size=1), st.integers(1, 4), st.sampled_from([0, 1, 2])
)
def test_no_list_of_its_length_pads_less_than_a_proposal(counts: dict[int, int], most: int, drafts: int) -> None:
    built = setup(12 // (1 + drafts), cudagraph_mode="FULL_DECODE_ONLY", num_speculative_tokens=drafts)
    demands = judging.counted("tokens", counts)
    chosen = VLLM.propose(built, {"tokens": demands}, {"tokens": most})["tokens"]
    assert len(chosen) <= most and chosen[-1] == (12,)
    least = judging.best(VLLM, built, demands, range(1 + drafts, 13, 1 + drafts), most)
    assert judging.padded(VLLM, built, demands, chosen) == least


def test_a_proposal_reaches_as_far_as_its_own_list_and_has_the_largest_decode_step() -> None:
    assert VLLM.propose(setup(100), {}, {"tokens": 9}) == {"tokens": ((100,), (200,))}
    with pytest.raises(InputError, match="at most 1 graph, but at least 2 are needed: 100, 200"):
        VLLM.propose(setup(100), {}, {"tokens": 1})


def test_a_file_for_config_states_limits_and_settings_too(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "model: some/model\nmax-model-len: 4096\nmax_num_seqs: 8\ncompilation-config:\n"
        "  cudagraph_capture_sizes: [8, 1]\n  cudagraph_mode: FULL_DECODE_ONLY\n"
    )
    found = load(VLLM, str(file), {}, {})
    assert (found.setup.limits.max_num_seqs, found.setup.own["cudagraph_mode"]) == (8, "FULL_DECODE_ONLY")
    assert found.lists == {"tokens": ((1,), (8,))}
    with pytest.raises(InputError, match="says max_num_seqs 8, but 9 was given"):
        load(VLLM, str(file), {"max_num_seqs": 9}, {})


def test_the_release_of_a_log_decides_which_rules_hold(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        "INFO Initializing a V1 LLM engine (v0.24.1) with config: ... 'cudagraph_capture_sizes': [1, 2, 4, 8], ...\n"
    )
    limits = {"max_model_len": 8192, "max_num_seqs": 8}
    assert load(VLLM, str(log), limits, {}).setup.own["release"] == "0.24"
    assert load(VLLM, str(log), limits, {"release": "0.33"}).setup.own["release"] == "0.33"


@pytest.mark.parametrize(
    ("own", "written"),
    [
        ({}, None),
        ({"speculative_method": "eagle3"}, None),
        ({"speculative_method": "ngram"}, {"num_speculative_tokens": 3, "method": "ngram"}),
        ({"speculative_method": "eagle3", "speculative_model": "org/draft"},
         {"num_speculative_tokens": 3, "method": "eagle3", "model": "org/draft"}),
    ],
)  # fmt: skip
def test_drafts_are_written_only_where_vllm_would_take_them(
    own: dict[str, str], written: dict[str, object] | None
) -> None:
    built = setup(num_speculative_tokens=3, **own)
    words = [word for word in VLLM.export(built, {"tokens": ((4,),)}).arguments if word.startswith("--speculative")]
    assert [json.loads(word.partition(" ")[2]) for word in words] == ([] if written is None else [written])
