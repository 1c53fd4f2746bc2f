"""What goes out to the server and comes back, and where its limits come from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.bucket import Bucket
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan, Provenance
from llmc.errors import InputError
from llmc.integrations.base import Export, GraphDemand, Pick, Setup
from llmc.integrations.evaluation import evaluate
from llmc.integrations.settings import complete, flags_of, from_flags
from llmc.integrations.vllm_gaudi.buckets import fallback_value
from tests.integrations.vllm_gaudi import planner
from tests.integrations.vllm_gaudi.setups import GAUDI, setup, setups
from tests.tiers import examples


def test_limits_of_a_server_that_was_reported_its_length_alone() -> None:
    assert GAUDI.limits({"max_model_len": 8192}).to_dict() == {
        "max_model_len": 8192, "max_num_seqs": 256, "max_num_batched_tokens": 2048, "block_size": 128,
    }  # fmt: skip
    assert GAUDI.limits({"max_model_len": 8192, "max_num_seqs": 4000}).max_num_batched_tokens == 4000


@examples(40)
@given(setups(most_len=9000, prompt_bs_max=1), st.sets(st.tuples(st.integers(1, 64), st.integers(1, 400)), min_size=1))
def test_what_is_exported_is_read_and_prepared_again(built: Setup, decodes: set[tuple[int, int]]) -> None:
    given_lists = {
        "prompt": ((1, 128, 0), (1, 128, 2)),
        "decode": tuple(sorted((min(b, c), 1, c) for b, c in decodes)),
    }
    prepared = GAUDI.accept(built, given_lists).lists
    written = GAUDI.export(built, prepared)
    assert GAUDI.read(written, built) == prepared
    assert GAUDI.accept(built, prepared).lists == prepared


def test_the_export_of_a_pinned_server() -> None:
    built = setup(8192, 32, 2048, num_hpu_blocks=3000, prefix_caching=False, num_speculative_tokens=2,
                 speculative_method="ngram")  # fmt: skip
    written = GAUDI.export(built, {"prompt": ((1, 128, 0), (4, 128, 0)), "decode": ((1, 1, 8),)})
    assert written.environment == {
        "VLLM_BUCKETING_FROM_FILE": "buckets.txt", "VLLM_PROMPT_BS_BUCKET_MAX": "4", "VLLM_CONTIGUOUS_PA": "true",
    }  # fmt: skip
    assert written.arguments == (
        "--max-model-len 8192", "--max-num-seqs 32", "--max-num-batched-tokens 2048", "--block-size 128",
        "--num-gpu-blocks-override 3000", "--no-enable-prefix-caching",
        '--speculative-config {"num_speculative_tokens": 2, "method": "ngram"}',
    )  # fmt: skip
    flags = flags_of([word for argument in written.arguments for word in argument.split(" ", 1)])
    own = complete(GAUDI.settings, from_flags(GAUDI.settings, flags, written.environment))
    assert (own["num_hpu_blocks"], own["prefix_caching"], own["num_speculative_tokens"]) == (3000, False, 2)
    assert (own["contiguous_pa"], own["prompt_bs_max"]) == (True, 4)


def test_without_a_file_its_own_buckets_are_read() -> None:
    built = setup()
    assert GAUDI.read(Export(), built) == GAUDI.default(built)


@pytest.mark.parametrize(
    ("given_export", "message"),
    [
        (Export(files={"buckets.txt": "(1, 1, 8)\n"}), "lists no prompt bucket"),
        (Export(files={"buckets.txt": "(1, 128, 0)\n"}), "lists no decode bucket"),
        (Export({"VLLM_BUCKETING_FROM_FILE": "x.txt"}), "names x.txt, which is not there"),
        (Export(arguments=("--block-size 64",)), "--block-size 64 disagrees with block_size 128"),
        (Export(arguments=("--max_num_batched_tokens=4096",)), "--max-num-batched-tokens 4096 disagrees"),
    ],
)
def test_an_import_that_the_server_refuses_or_that_disagrees(given_export: Export, message: str) -> None:
    with pytest.raises(InputError, match=message):
        GAUDI.read(given_export, setup())


def plan(limits: Limits) -> Plan:
    buckets = (
        Bucket("prompt", 1, 256, 0), Bucket("prompt", 1, 256, 1000), Bucket("prompt", 2, 128, 0),
        Bucket("decode", 4, 1, 1000), Bucket("decode", 4, 1, 1024),
    )  # fmt: skip
    return Plan(limits, buckets, Provenance({}, {}, {}, ()))  # type: ignore[arg-type]


def test_a_plans_contexts_are_counted_in_blocks_of_the_whole_batch() -> None:
    built = setup(2048, 4, 512)
    lists = GAUDI.from_plan(built, plan(built.limits))
    assert lists == {"prompt": ((1, 256, 0), (1, 256, 8)), "decode": ((4, 1, 32), (4, 1, 36))}
    contiguous = setup(2048, 4, 512, contiguous_pa=True)
    assert GAUDI.from_plan(contiguous, plan(built.limits))["decode"] == ((4, 1, 33), (4, 1, 37))


def test_a_plan_of_other_limits_is_refused() -> None:
    with pytest.raises(InputError, match="the plan has block_size 64 and the server 128"):
        GAUDI.from_plan(setup(2048, 4, 512), plan(Limits(2048, 4, 512, 64)))


def test_graphs_are_buckets() -> None:
    assert GAUDI.graphs(setup(), {"prompt": ((1, 128, 0),), "decode": ((1, 1, 8), (2, 1, 8))}) == 3


@pytest.mark.parametrize(
    ("number", "step", "value"),
    [(0, 32, 0), (1, 2, 1), (31, 32, 128), (4001, 32, 4096), (7365, 32, 7680), (4026, 32, 4096), (24, 2, 24)],
)
def test_values_of_the_plug_ins_examples(number: int, step: int, value: int) -> None:
    assert fallback_value(number, step) == value


def test_the_first_covering_bucket_is_taken_and_not_the_cheapest() -> None:
    finder = GAUDI.finder(setup(), "decode", ((1, 1, 64), (2, 1, 2048), (4, 1, 64)))
    assert finder.find((2, 1, 40)) == Pick((2, 1, 2048))
    assert finder.find((1, 1, 100)) == Pick((2, 1, 2048))


@examples(60)
@given(setups(), st.data())
def test_found_buckets_are_the_planners(built: Setup, data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(["prompt", "decode"]))
    prepared = GAUDI.default(built)[family]
    finder = GAUDI.finder(built, family, prepared)
    known = list(prepared)
    for _ in range(8):
        batch, context = data.draw(st.integers(1, 300)), data.draw(st.integers(0, 5000))
        requested = (batch, data.draw(st.integers(2, 9000)) if family == "prompt" else 1, context)
        found = finder.find(requested)
        if family == "decode":
            requested = (batch, 1, min(context, max(c for _, _, c in prepared)))
        expected = planner.take(known, requested)
        if expected is None:
            assert found.miss == "compile"
            known.append(found.shape)  # type: ignore[arg-type]
        else:
            assert found.shape == expected


def test_a_miss_adds_a_bucket_within_the_limits() -> None:
    built = setup(8192, 32, 2048, num_hpu_blocks=4000)
    prompts = GAUDI.finder(built, "prompt", ((1, 128, 0),))
    assert prompts.find((1, 1000, 10)) == Pick((1, 1280, 64), "compile")
    assert prompts.find((1, 1100, 60)) == Pick((1, 1280, 64))
    assert prompts.find((1, 2001, 3)) == Pick((1, 2048, 64), "compile")
    decodes = GAUDI.finder(built, "decode", ((1, 1, 300),))
    assert decodes.find((31, 1, 200)) == Pick((32, 1, 300), "compile")
    assert decodes.find((31, 1, 999)) == Pick((32, 1, 300), "compile")
    assert decodes.find((20, 1, 200)) == Pick((32, 1, 300))


def test_a_step_that_is_larger_than_what_is_added_counts_in_its_own_size() -> None:
    built = setup(8192, 32, 2048)
    steps = {(2, 1, 90): GraphDemand("decode", (2, 1, 90), 3, 3 * 92)}
    lists = {"prompt": ((1, 2048, 64),), "decode": ((2, 1, 60),)}
    decode = evaluate(GAUDI, built, lists, {"decode": steps}).family("decode")
    assert (decode.misses, decode.real, decode.padded) == ({"compile": 3}, 276, 276)


def test_long_prompts_of_a_slicing_server_are_rounded_to_slices() -> None:
    finder = GAUDI.finder(setup(32768, 8, 20480, sdpa_slices=True), "prompt", ((1, 128, 0),))
    assert finder.find((1, 9000, 0)).shape == (1, 9216, 0)
