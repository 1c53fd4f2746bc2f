"""The plan as data: its file, what loading refuses, and its digest."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given

from llmc.buckets.bucket import Bucket
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan, Provenance
from llmc.buckets.planner.planner import make_plan
from llmc.buckets.strategies.base import Range
from llmc.errors import InputError
from llmc.settings import Settings
from tests.buckets.generators import PROPERTY, plan_arguments

GOLDEN = Path(__file__).with_name("golden_plan.json")


def golden() -> Plan:
    """A plan with every kind of note, origin and limit in it."""
    settings = Settings.from_environment(
        {
            "VLLM_DECODE_BLOCK_BUCKET_STEP": "2",
            "VLLM_PROMPT_SEQ_BUCKET_MAX": "64",
            "VLLM_PROMPT_QUERY_BUCKET_MAX": "96",
        }
    )
    return make_plan(
        Limits(300, 6, 128, 32, 200),
        prompt_batch=Range(1, 2, 4),
        settings=settings,
        limit_origins={"max_model_len": "flag"},
    )


def test_the_format_is_the_golden_file():
    """When this fails on purpose, raise SCHEMA, or say in the change why old files still load."""
    assert golden().to_json() == GOLDEN.read_text(encoding="utf-8")
    assert Plan.load(GOLDEN) == golden()


def test_the_json_has_exactly_the_documented_fields():
    document = json.loads(golden().to_json())
    assert sorted(document) == ["decode", "limits", "prompt", "provenance", "schema"]
    assert document["schema"] == 1
    assert document["limits"] == {
        "max_model_len": 300,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 128,
        "block_size": 32,
        "max_prompt_len": 200,
    }
    assert [1, 32, 0] in document["prompt"]
    assert all(query == 1 for _, query, _ in document["decode"])


@PROPERTY
@given(plan_arguments())
def test_json_round_trip(arguments):
    try:
        plan = make_plan(**arguments)
    except InputError:
        return
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert hash(again) == hash(plan)


def test_save_and_load(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("older")
    golden().save(path)
    assert Plan.load(path) == golden()
    assert [child.name for child in tmp_path.iterdir()] == ["plan.json"]


def test_the_digest_changes_with_any_bucket_and_only_then():
    plan = golden()
    assert plan.digest() == golden().digest() == Plan.from_json(plan.to_json()).digest()
    assert len(plan.digest()) == 64
    assert replace(plan, buckets=plan.buckets[1:]).digest() != plan.digest()
    assert replace(plan, buckets=plan.buckets[::-1]).digest() == plan.digest()


def test_a_plan_crosses_processes_after_use():
    plan = golden()
    plan.lookup("decode", 1, 1, 5)
    assert pickle.loads(pickle.dumps(plan)) == plan


def broken(**changes: object) -> str:
    document = json.loads(golden().to_json())
    for path, value in changes.items():
        *parents, last = path.split("__")
        index = document
        for parent in parents:
            index = index[parent]
        if value is None:
            del index[last]
        else:
            index[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "p.json: not valid JSON"),
        ("[" * 100_000, "p.json: not valid JSON"),
        ("[]", r"p.json: field 'the document' must be an object, found \[\]"),
        (broken(schema=2), "p.json: field 'schema' is 2, this version of llmc reads 1"),
        (broken(schema=None), "p.json: field 'schema' is missing"),
        (broken(schema=True), "p.json: field 'schema' must be an integer, found true"),
        (broken(extra=1), "p.json: field 'extra' is unknown; remove it"),
        (broken(limits__max_num_seqs="6"), "p.json: field 'limits.max_num_seqs' must be an integer"),
        (broken(limits__max_num_seqs=0), "p.json: field 'limits': max_num_seqs 0 must be at least 1"),
        (broken(limits__colour=1), "p.json: field 'limits.colour' is unknown"),
        (broken(prompt=[]), "p.json: the plan has no prompt bucket, so it covers nothing"),
        (broken(decode=[]), "p.json: the plan has no decode bucket, so it covers nothing"),
        (broken(prompt={}), "p.json: field 'prompt' must be an array"),
        (broken(prompt=[[1, 2]]), r"p.json: field 'prompt\[0\]' must be \[batch, query, context\]"),
        (broken(prompt=[[1, 2, None]]), r"p.json: field 'prompt\[0\]': prompt bucket: context None"),
        (broken(decode=[[1, 2, 3]]), r"p.json: field 'decode\[0\]': decode bucket: query 2 must be 1"),
        (broken(decode=[[6, 1, 300]] * 2), r"p.json: the plan has decode\[6x1\+300\] twice"),
        (broken(decode=[[7, 1, 300]]), r"p.json: decode\[7x1\+300\]: batch 7 is above max_num_seqs 6"),
        (broken(decode=[[6, 1, 301]]), "context 301 is above max_model_len 300"),
        (broken(prompt=[[2, 100, 0]]), r"batch\*query 200 is above max_num_batched_tokens 128"),
        (broken(decode=[[6, 1, 298]]), "p.json: no bucket for decode batch 1 to 6 with 299 to 299 cached"),
        (broken(prompt=[[1, 100, 99]]), "no bucket for prompt batch 1 to 6 with 200 to 200 prompt tokens"),
        (broken(provenance__strategy=1), "p.json: field 'provenance.strategy' must be a string, found 1"),
        (broken(provenance__notes=[{}]), r"p.json: field 'provenance.notes\[0\].kind' is missing"),
        (
            broken(provenance__notes=[{"kind": "lost", "text": "", "count": 0}]),
            r"field 'provenance.notes\[0\].kind' must be one of added, dropped, warning",
        ),
        (
            broken(provenance__notes=[{"kind": "added", "text": "", "count": 0, "phase": "x"}]),
            r"field 'provenance.notes\[0\].phase' must be one of prompt, decode",
        ),
        (
            broken(provenance__parameters__prompt_batch={"min": "1"}),
            "field 'provenance.parameters.prompt_batch.min' must be an integer",
        ),
        (
            broken(provenance__origins=[1] * 50),
            r"field 'provenance.origins' must be an object, found \[1.*\.\.\.",
        ),
    ],
)
def test_loading_names_the_file_and_the_field(text, message):
    with pytest.raises(InputError, match=message):
        Plan.from_json(text, "p.json")


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path):
    with pytest.raises(InputError, match=r"cannot read the plan .*absent\.json"):
        Plan.load(tmp_path / "absent.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"cannot read the plan .*binary"):
        Plan.load(tmp_path / "binary")
    with pytest.raises(InputError, match=r"cannot write the plan to .*No such file"):
        golden().save(tmp_path / "absent" / "plan.json")


def test_a_plan_needs_both_phases():
    with pytest.raises(InputError, match="no decode bucket"):
        Plan(Limits(8), (Bucket("prompt", 1, 8, 0),), Provenance("by hand"))
