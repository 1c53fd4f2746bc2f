"""OpenVINO GenAI's two graphs on an NPU: their own lengths, what is made of others, and what is said of both."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.step_time import AssumedStepTime
from llmc.errors import InputError
from llmc.integrations import bucket_rules
from llmc.integrations.base import Export, GraphDemand, Lists, Pick, Setup
from llmc.integrations.settings import Value, complete

NPU = bucket_rules("openvino-genai")


def setup(max_model_len: int = 4096, max_prompt_len: int = 2000, **own: Value) -> Setup:
    limits = NPU.limits({"max_model_len": max_model_len, "max_prompt_len": max_prompt_len})
    return Setup(limits, complete(NPU.settings, own))


def lengths(prompt: int, total: int) -> Lists:
    return {"prompt": ((prompt,),), "cache": ((total,),)}


def test_its_own_lengths_are_the_same_for_all_limits() -> None:
    assert NPU.default(setup()) == NPU.default(setup(100, 10)) == lengths(1024, 1152)


@pytest.mark.parametrize(
    ("built", "prompt", "total", "padded"),
    [
        (setup(prefill_chunk_size=256), 100, 200, (128, 256)),
        (setup(prefill_chunk_size=256), 300, 400, (256, 448)),
        (setup(prefill_chunk_size=32), 20, 84, (32, 128)),
        (setup(prefill_hint="STATIC", prefill_chunk_size=256), 300, 400, (320, 448)),
        (setup(), 2048, 4096, (1024, 4096)),
    ],
)
def test_lengths_are_admitted_as_stated_and_padded_to_64_or_to_chunks(
    built: Setup, prompt: int, total: int, padded: tuple[int, int]
) -> None:
    accepted = NPU.accept(built, lengths(prompt, total))
    assert accepted.lists == lengths(prompt, total) and not accepted.dropped
    assert (NPU.work(built, "prompt", (prompt,)), NPU.work(built, "cache", (total,))) == padded


@pytest.mark.parametrize(
    ("built", "given_lists", "words"),
    [
        (setup(), {"prompt": ((64,), (128,)), "cache": ((256,),)}, "2 lengths for 'prompt'"),
        (setup(), lengths(64, 64), "a cache of 64 tokens has no room after 64"),
        (setup(prefill_chunk_size=100), lengths(1024, 2048), "NPUW_LLM_PREFILL_CHUNK_SIZE 100 is not a power of two"),
    ],
)
def test_what_it_refuses(built: Setup, given_lists: Lists, words: str) -> None:
    with pytest.raises(InputError, match=words):
        NPU.accept(built, given_lists)


def test_one_request_runs_at_a_time() -> None:
    with pytest.raises(InputError, match="an NPU runs one request at a time"):
        NPU.limits({"max_model_len": 100, "max_num_seqs": 2})


def test_a_longer_prompt_is_refused_and_a_longer_answer_cut() -> None:
    for family, length in (("prompt", 1024), ("cache", 1152)):
        finder = NPU.finder(setup(), family, ((length,),))
        assert [finder.find((n,)) for n in (1, length, length + 1)] == [
            Pick((length,)), Pick((length,)), Pick((length + 1,), "error"),
        ]  # fmt: skip


def test_prompts_are_padded_to_chunks_and_every_token_to_the_whole_cache() -> None:
    built = setup(prefill_chunk_size=256)
    assert list(NPU.demands(built, [TrafficRequest(0, 300, 3), TrafficRequest(0, 9, 1)], AssumedStepTime())) == [
        GraphDemand("prompt", (300,), 2, 300), GraphDemand("cache", (303,), 2, 301 + 302),
        GraphDemand("prompt", (9,), 1, 9),
    ]  # fmt: skip
    assert [NPU.work(built, "prompt", (n,)) for n in (128, 1024)] == [128, 256]
    assert NPU.work(setup(prefill_hint="STATIC"), "prompt", (2048,)) == 2048
    assert NPU.work(built, "cache", (1152,)) == 1152


def test_a_static_prompt_is_one_run() -> None:
    built = setup(prefill_hint="STATIC", prefill_chunk_size=256)
    (demand,) = NPU.demands(built, [TrafficRequest(0, 1000, 1)], AssumedStepTime())
    assert demand == GraphDemand("prompt", (1000,), 1, 1000)


@given(st.integers(2, 9000), st.data(), st.sampled_from([64, 256, 1024]), st.sampled_from(["DYNAMIC", "STATIC"]))
def test_a_proposal_covers_the_limits_with_the_least_lengths(
    model: int, data: st.DataObject, chunk: int, hint: str
) -> None:
    prompt = data.draw(st.integers(1, model - 1))
    built = setup(model, prompt, prefill_chunk_size=chunk, prefill_hint=hint)
    lists = NPU.propose(built, {}, {"prompt": 1, "cache": 1})
    assert NPU.accept(built, lists).lists == lists
    held, total = lists["prompt"][0][0], lists["cache"][0][0]
    assert held >= prompt and total >= model
    multiple = chunk if hint == "DYNAMIC" and held > chunk else 64
    assert held - multiple < prompt and (total - 64 < model or total == held + 64)
    written = NPU.export(built, lists)
    assert NPU.read(written, built) == lists
    assert json.loads(written.files["config.json"])["MAX_PROMPT_LEN"] == held


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"MAX_PROMPT_LEN": 0}', "c.json: MAX_PROMPT_LEN 0 must be a whole number above 0"),
        ('{"MIN_RESPONSE_LEN": "128"}', "MIN_RESPONSE_LEN '128' must be"),
        ('{"PREFILL_HINT": "STATIC"}', "PREFILL_HINT is STATIC, but the setting prefill_hint is DYNAMIC"),
        ('{"NPUW_LLM_PREFILL_CHUNK_SIZE": 64}', "CHUNK_SIZE is 64, but the setting prefill_chunk_size is 1024"),
    ],
)
def test_a_file_that_it_refuses_is_an_error(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        NPU.read(Export(files={"c.json": text}), setup())


def test_what_a_file_leaves_out_has_its_default() -> None:
    assert NPU.read(Export(files={"c.json": '{"MIN_RESPONSE_LEN": 256}'}), setup()) == lengths(1024, 1280)
    assert NPU.read(Export(), setup()) == lengths(1024, 1152)
    assert NPU.read(Export(files={"c.json": '{"MAX_PROMPT_LEN": 1030}'}), setup()) == lengths(1030, 1158)


def test_the_log_of_a_start_has_the_lengths() -> None:
    lines = ["Model: Stateful LLM model", "  NPUW_LLM_MAX_PROMPT_LEN: 2048", "  NPUW_LLM_MIN_RESPONSE_LEN: 512"]
    assert NPU.read_log(lines) == lengths(2048, 2560)
    assert NPU.read_log(lines[:2]) is None
