"""What goes out to the server and comes back, and where its limits come from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.bucket import Bucket
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan, Provenance
from llmc.buckets.servers.base import Export, Setup
from llmc.buckets.servers.settings import complete, flags_of, from_flags
from llmc.errors import InputError
from tests.buckets.servers.vllm_gaudi.setups import GAUDI, setup, setups
from tests.tiers import examples


def test_limits_of_a_server_that_was_told_its_length_alone() -> None:
    assert GAUDI.limits({"max_model_len": 8192}).to_dict() == {
        "max_model_len": 8192, "max_num_seqs": 256, "max_num_batched_tokens": 2048, "block_size": 128,
    }  # fmt: skip
    assert GAUDI.limits({"max_model_len": 8192, "max_num_seqs": 4000}).max_num_batched_tokens == 4000


@examples(40)
@given(setups(most_len=9000, prompt_bs_max=1), st.sets(st.tuples(st.integers(1, 64), st.integers(1, 400)), min_size=1))
def test_what_is_exported_is_read_and_prepared_again(made: Setup, decodes: set[tuple[int, int]]) -> None:
    given_lists = {
        "prompt": ((1, 128, 0), (1, 128, 2)),
        "decode": tuple(sorted((min(b, c), 1, c) for b, c in decodes)),
    }
    prepared = GAUDI.accept(made, given_lists).lists
    written = GAUDI.export(made, prepared)
    assert GAUDI.read(written, made) == prepared
    assert GAUDI.accept(made, prepared).lists == prepared


def test_the_export_of_a_pinned_server() -> None:
    made = setup(8192, 32, 2048, num_hpu_blocks=3000, prefix_caching=False, num_speculative_tokens=2)
    written = GAUDI.export(made, {"prompt": ((1, 128, 0), (4, 128, 0)), "decode": ((1, 1, 8),)})
    assert written.environment == {
        "VLLM_BUCKETING_FROM_FILE": "buckets.txt", "VLLM_PROMPT_BS_BUCKET_MAX": "4", "VLLM_CONTIGUOUS_PA": "true",
    }  # fmt: skip
    assert written.arguments == (
        "--max-model-len 8192", "--max-num-seqs 32", "--max-num-batched-tokens 2048", "--block-size 128",
        "--num-gpu-blocks-override 3000", "--no-enable-prefix-caching",
        '--speculative-config {"num_speculative_tokens": 2}',
    )  # fmt: skip
    flags = flags_of([word for argument in written.arguments for word in argument.split(" ", 1)])
    own = complete(GAUDI.settings, from_flags(GAUDI.settings, flags, written.environment))
    assert (own["num_hpu_blocks"], own["prefix_caching"], own["num_speculative_tokens"]) == (3000, False, 2)
    assert (own["contiguous_pa"], own["prompt_bs_max"]) == (True, 4)


def test_without_a_file_its_own_buckets_are_read() -> None:
    made = setup()
    assert GAUDI.read(Export(), made) == GAUDI.default(made)


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
    made = setup(2048, 4, 512)
    lists = GAUDI.from_plan(made, plan(made.limits))
    assert lists == {"prompt": ((1, 256, 0), (1, 256, 8)), "decode": ((4, 1, 32), (4, 1, 36))}
    contiguous = setup(2048, 4, 512, contiguous_pa=True)
    assert GAUDI.from_plan(contiguous, plan(made.limits))["decode"] == ((4, 1, 33), (4, 1, 37))


def test_a_plan_of_other_limits_is_refused() -> None:
    with pytest.raises(InputError, match="the plan has block_size 64 and the server 128"):
        GAUDI.from_plan(setup(2048, 4, 512), plan(Limits(2048, 4, 512, 64)))


def test_graphs_are_buckets() -> None:
    assert GAUDI.graphs(setup(), {"prompt": ((1, 128, 0),), "decode": ((1, 1, 8), (2, 1, 8))}) == 3
