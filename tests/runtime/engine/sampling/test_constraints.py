"""Constraints: whatever the logits, the text has the form that was asked for."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import sys
import threading
import time

import jsonschema
import numpy as np
import pytest

from llmc.errors import ArtifactError, InputError
from llmc.platforms import install_line
from llmc.runtime.confined.limits import ChildLimits
from llmc.runtime.confined.pool import ChildJob
from llmc.runtime.engine.sampling import constraints, grammars
from llmc.runtime.engine.sampling.batch import sample
from llmc.runtime.engine.sampling.constraints import MAX_GRAMMARS, ConstraintFactory, GrammarConstraint
from llmc.runtime.engine.sampling.params import SamplingParams, StructuredOutputsParams
from llmc.runtime.engine.sampling.sampler import SequenceSampler
from llmc.runtime.text.tokenizer import Tokenizer
from llmc.testing.toy import BYTES, EOS, VOCAB, tokenizer_json
from tests.tiers import full
from tests.timing import until

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None, 3.5]}, "minItems": 1, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"at": {"type": "boolean"}}, "required": ["at"]}},
}


@pytest.fixture(scope="module")
def factory() -> ConstraintFactory:
    return ConstraintFactory(tokenizer_json(), VOCAB, [EOS])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tokenizer_json().encode(), [EOS])


def ids(text: str) -> list[int]:
    """The toy's tokens of an ASCII text."""
    return [BYTES.index(c if c != " " else "Ġ") for c in text]


def write(factory, structured, seed, *, spread=3.0, vocab=VOCAB, most=4000, **params) -> list[int]:
    """Random logits, one token at a time, until the sequence ends; the ids without the end token."""
    constraint = factory.compile(structured)
    options = {"seed": seed, "max_tokens": None, **params}
    one = SequenceSampler(SamplingParams(**options), vocab, (), [EOS], constraint)
    random, out = np.random.default_rng(seed), []
    while len(out) < most:
        row = (random.standard_normal((1, vocab)) * spread).astype(np.float32)
        (token,) = sample(row, [one]).ids
        if token == EOS:
            break
        out.append(token)
        if one.finished:
            break
    else:
        pytest.fail("the text did not end")
    assert constraint.error is None
    return out


@pytest.mark.parametrize("params", [{}, {"temperature": 0}, {"top_p": 0.3}, {"top_k": 5, "min_tokens": 30}])
def test_json_follows_its_schema_whatever_the_logits(factory, tokenizer, params):
    for seed in range(8):
        text = tokenizer.decode(write(factory, StructuredOutputsParams(json=PERSON), seed, **params))
        jsonschema.validate(json.loads(text), PERSON)


def test_any_object_is_an_object(factory, tokenizer):
    for seed in range(8):
        text = tokenizer.decode(write(factory, StructuredOutputsParams(json_object=True), seed, spread=1.0))
        assert isinstance(json.loads(text), dict)


def test_an_expression_matches_the_whole_text(factory, tokenizer):
    pattern = r"[a-f]{2,5}-([0-9]{3}|é)+\.?"
    for seed in range(20):
        text = tokenizer.decode(write(factory, StructuredOutputsParams(regex=pattern), seed))
        assert re.fullmatch(pattern, text)


def test_a_choice_is_one_of_them_and_ends_by_itself(factory, tokenizer):
    choice = ["yes", "no", 'say "no"\n', "né𝄞"]
    built = {tokenizer.decode(write(factory, StructuredOutputsParams(choice=choice), seed)) for seed in range(60)}
    assert built == set(choice)


def test_a_grammar_is_followed(factory, tokenizer):
    grammar = 'start: "(" start ")" | /[0-9]{1,3}/'
    for seed in range(10):
        text = tokenizer.decode(write(factory, StructuredOutputsParams(grammar=grammar), seed))
        depth = text.count("(")
        assert re.fullmatch(rf"\({{{depth}}}[0-9]{{1,3}}\){{{depth}}}", text)


def test_the_end_is_allowed_exactly_where_the_text_is_complete(factory):
    constraint = factory.compile(StructuredOutputsParams(choice=["ab", "abc"]))
    seen = []
    for token in ids("abc"):
        seen.append((np.flatnonzero(constraint.mask()).tolist(), constraint.finished))
        constraint.accept(token)
    a, b, c = ids("abc")
    assert seen == [([a], False), ([b], False), ([c, EOS], False)]
    assert constraint.finished and constraint.mask().tolist() == [i == EOS for i in range(VOCAB)]
    constraint.accept(EOS)
    assert constraint.finished and constraint.error is None


def test_min_tokens_and_bad_words_yield_to_a_complete_text(factory, tokenizer):
    structured = StructuredOutputsParams(choice=["ab"])
    assert tokenizer.decode(write(factory, structured, 0, min_tokens=9)) == "ab"
    one = SequenceSampler(SamplingParams(), VOCAB, (), [EOS], factory.compile(structured), bad_words=[ids("a")])
    assert sample(np.zeros((1, VOCAB), np.float32), [one]).ids == ids("a")


def test_white_space_does_not_go_on_for_ever(factory):
    constraint = factory.compile(StructuredOutputsParams(json_object=True))
    constraint.accept(*ids("{"))
    space, count = ids(" ")[0], 0
    while constraint.mask()[space] and count < 99:
        constraint.accept(space)
        count += 1
    assert count == 32 and constraint.mask()[ids('"')[0]] and constraint.error is None


def test_a_token_against_the_mask_ends_it_with_an_error(factory):
    constraint = factory.compile(StructuredOutputsParams(regex="a+"))
    constraint.accept(*ids("b"))
    assert constraint.finished and np.flatnonzero(constraint.mask()).tolist() == [EOS]
    error = constraint.error or ""
    assert "doesn't satisfy the grammar" in error and "\n" not in error and "state" not in error


def test_sequences_do_not_share_their_place(factory):
    structured = StructuredOutputsParams(choice=["ab", "cd"])
    first, second = factory.compile(structured), factory.compile(structured)
    first.accept(*ids("a"))
    assert np.flatnonzero(second.mask()).tolist() == ids("ac") and np.flatnonzero(first.mask()).tolist() == ids("b")


def test_ids_that_the_tokenizer_lacks_are_never_allowed():
    wide = ConstraintFactory(tokenizer_json(), VOCAB + 63, [EOS])
    mask = wide.compile(StructuredOutputsParams(regex="(?s:.)*")).mask()
    assert mask.shape == (VOCAB + 63,) and mask[:VOCAB].any() and not mask[VOCAB:].any()
    narrow = ConstraintFactory(tokenizer_json(), 100, [EOS])
    assert narrow.compile(StructuredOutputsParams(regex="[a-z]")).mask().shape == (100,)


def test_a_model_without_an_end_token_finishes_all_the_same():
    constraint = ConstraintFactory(tokenizer_json(), VOCAB, []).compile(StructuredOutputsParams(choice=["ab", "abc"]))
    for token in ids("ab"):
        constraint.accept(token)
    assert np.flatnonzero(constraint.mask()).tolist() == ids("c") and not constraint.finished
    constraint.accept(*ids("c"))
    assert constraint.finished and constraint.mask().any()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json": {"type": "nonsense"}}, "json cannot be followed: Invalid type: nonsense"),
        ({"json": {"type": "array", "uniqueItems": True}}, "json cannot be followed: Unimplemented keys"),
        ({"json": {"enum": []}}, "json cannot be followed: Unsatisfiable schema"),
        ({"json": {"$ref": "file:///etc/passwd"}}, "json cannot be followed: .* does not fetch resources"),
        ({"json": {"$ref": "#"}}, "json cannot be followed: no text meets it"),
        ({"json": {"const": "\ud800"}}, "json cannot be followed: "),
        ({"regex": "[a"}, "regex cannot be followed: .*unclosed character class"),
        ({"regex": "(?=a)b"}, "regex cannot be followed: .*look-around"),
        ({"regex": "[^\\s\\S]"}, "regex cannot be followed: no text meets it"),
        ({"regex": "a" * (1 << 18) + "b"}, "regex has 262145 characters; at most 262144 are taken: make it smaller"),
        ({"choice": ["a" * (1 << 17)] * 3}, "choice has 393216 characters; at most 262144"),
        ({"grammar": "start: foo"}, 'grammar cannot be followed: .*unknown name: "foo"$'),
        ({"grammar": "start: " + "(" * 10_000}, "grammar cannot be followed: .*too deeply nested"),
        ({"grammar": " "}, "grammar cannot be followed: Empty grammar"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_reason(factory, fields, message):
    with pytest.raises(InputError, match=f"^structured_outputs.{message}") as caught:
        factory.compile(StructuredOutputsParams(**fields))
    said = str(caught.value)
    assert "\n" not in said and "<state>" not in said and len(said) < 400


@pytest.mark.parametrize("schema", [{"type": "integer"}, {"anyOf": [{"type": "integer"}, {"type": "null"}]}])
def test_deep_schemas_do_no_harm(factory, schema):
    for _ in range(400):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InputError, match=r"recursion limit|nested too deeply"):
        factory.compile(StructuredOutputsParams(json=schema))


def test_grammars_are_compiled_once_and_forgotten_in_turn(monkeypatch):
    built = ConstraintFactory(tokenizer_json(), VOCAB, [EOS])
    compiled, build = [], grammars.build

    def counted(*args):
        compiled.append(args)
        return build(*args)

    monkeypatch.setattr(grammars, "build", counted)
    for _ in range(3):
        built.compile(StructuredOutputsParams(regex="a"))
    assert len(compiled) == 1
    for i in range(MAX_GRAMMARS):
        built.compile(StructuredOutputsParams(regex=f"b{i}"))
    assert len(built._compiled) == MAX_GRAMMARS
    built.compile(StructuredOutputsParams(regex="a"))
    assert len(compiled) == MAX_GRAMMARS + 2


def test_threads_may_share_a_factory(factory):
    wrong = []

    def work(seed):
        structured = StructuredOutputsParams(regex=f"x{{{1 + seed % 3}}}")
        for _ in range(20):
            if len(write(factory, structured, seed)) != 1 + seed % 3:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("text", ["gpt2", "", "{", '{"a": 1}'])
def test_what_is_no_tokenizer_is_refused(text):
    with pytest.raises(ArtifactError, match=r"tokenizer\.json"):
        ConstraintFactory(text, VOCAB, [EOS])


def test_a_path_is_no_tokenizer_even_where_one_lies(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(tokenizer_json())
    with pytest.raises(ArtifactError, match="holds no JSON object"):
        ConstraintFactory(str(file), VOCAB, [EOS])


def test_without_llguidance_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InputError, match=rf"not installed; run: {re.escape(install_line('serve'))}"):
        ConstraintFactory(tokenizer_json(), VOCAB, [EOS])


def wrapped(ref: dict) -> dict:
    return {"type": "object", "properties": {"a": ref}, "required": ["a"], "additionalProperties": False}


def chained(count: int, link=wrapped) -> dict:
    """A schema of so many definitions, each of which needs the next."""
    defs = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{count}": {"type": "integer"}}}


SMALL = ChildLimits(seconds=0.5, memory_bytes=256 << 20, stack_bytes=1 << 20)
HOSTILE = [
    ({"json": chained(2000)}, "nested or chained too deeply for a stack of 1 MiB; make it flatter"),
    ({"json": chained(3000, lambda ref: ref)}, "too deeply"),
    ({"json": chained(1500, lambda ref: {"anyOf": [ref, {"type": "null"}]})}, "too deeply"),
    ({"grammar": "start: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(4000)) + 'r4000: "b"'}, "too deeply"),
    ({"regex": "".join(f"(x{i}|y{i})?" for i in range(12_000))},
     "more than 0.5 s of processor time; make it smaller, or raise LLMC_GRAMMAR_SECONDS of the server"),
]  # fmt: skip


@pytest.fixture(scope="module")
def bounded():
    built = ConstraintFactory(tokenizer_json(), VOCAB, [EOS], SMALL)
    yield built
    built.close()


@pytest.mark.parametrize(("fields", "message"), HOSTILE)
def test_a_hostile_grammar_is_refused_by_the_limit_that_it_passes(bounded, fields, message):
    with pytest.raises(InputError, match=f"^structured_outputs.{next(iter(fields))} cannot be followed: .*{message}"):
        bounded.compile(StructuredOutputsParams(**fields))
    assert bounded.compile(StructuredOutputsParams(regex="good")).mask().sum() == 1


def test_a_small_text_that_takes_long_is_refused_by_processor_time():
    """It takes about 0.7 s of a fast processor, where a usual expression takes 0.01 s."""
    built = ConstraintFactory(tokenizer_json(), VOCAB, [EOS], dataclasses.replace(SMALL, seconds=0.1))
    try:
        with pytest.raises(InputError, match=r"more than (0\.1 s of processor time|256 MiB of memory)"):
            built.compile(StructuredOutputsParams(regex="(a{1000}){1000}"))
    finally:
        built.close()


def test_what_was_refused_is_not_tried_again(bounded, monkeypatch):
    structured = StructuredOutputsParams(json=chained(1999))
    with pytest.raises(InputError) as first:
        bounded.compile(structured)
    monkeypatch.setattr(bounded, "_pool", None)
    with pytest.raises(InputError) as again:
        bounded.compile(structured)
    assert str(again.value) == str(first.value)


def test_the_oldest_refusals_are_forgotten(bounded, monkeypatch):
    """Of three, the two that were asked for last are kept."""
    monkeypatch.setattr(constraints, "MAX_REFUSALS", 2)
    bounded._refused.clear()
    tried, run = [], bounded._pool.run
    monkeypatch.setattr(bounded._pool, "run", lambda job: tried.append(job["form"]) or run(job))
    for regex in ("a(", "b(", "c(", "c(", "b(", "a("):
        with pytest.raises(InputError, match=r"structured_outputs\.regex cannot be followed"):
            bounded.compile(StructuredOutputsParams(regex=regex))
    assert tried == ["a(", "b(", "c(", "a("]


def test_what_the_grammar_library_says_is_cut_after_300_characters():
    assert grammars.first_line("x" * 400) == "x" * 300


@full
def test_what_held_in_the_child_is_built_here_with_stack_to_spare(factory, tokenizer):
    depth = 500
    structured = StructuredOutputsParams(json=chained(depth))
    text = tokenizer.decode(write(factory, structured, 0, most=100_000))
    assert text.count("{") == depth


def test_a_grammar_is_built_here_with_twice_the_stack_of_its_trial(bounded, monkeypatch):
    sizes, set_size = [], threading.stack_size
    monkeypatch.setattr(threading, "stack_size", lambda size=0: sizes.append(size) or set_size(size))
    bounded.compile(StructuredOutputsParams(regex="stack"))
    assert sizes[0] == 2 * SMALL.stack_bytes


def test_a_text_whose_grammar_becomes_too_complex_ends_with_the_reason(factory):
    """What no first step shows: the pattern comes after a constant."""
    pattern = {"type": "string", "pattern": "^(a{1000}){1000}$"}
    schema = {"type": "object", "properties": {"a": {"const": 1}, "b": pattern}, "required": ["a", "b"]}
    constraint = factory.compile(StructuredOutputsParams(json=schema))
    for _ in range(200):
        allowed = np.flatnonzero(constraint.mask())
        if constraint.finished:
            break
        constraint.accept(int(allowed[0]))
    assert constraint.finished and "too many" in constraint.error
    assert constraint.mask().tolist() == [i == EOS for i in range(VOCAB)]
    constraint.accept(EOS)
    assert constraint.finished and constraint.error is not None


def test_a_text_whose_masks_take_too_long_ends_with_the_reason(factory, monkeypatch):
    constraint = factory.compile(StructuredOutputsParams(json_object=True))
    times = iter(range(100))
    monkeypatch.setattr(time, "thread_time", lambda: next(times) * 1.1)
    assert constraint.mask().any() and constraint.finished and "CPU time" in constraint.error
    assert constraint.mask().tolist() == [i == EOS for i in range(VOCAB)]


def test_native_code_that_panics_fails_its_text_alone(factory):
    class PanicException(BaseException):  # as pyo3 raises it
        pass

    class Matcher:
        def compute_bitmask(self):
            raise PanicException("index out of bounds")

    constraint = GrammarConstraint(Matcher(), VOCAB, [EOS])
    assert constraint.mask().tolist() == [i == EOS for i in range(VOCAB)]
    assert (constraint.finished, constraint.error) == (True, "index out of bounds")


def test_4096_choices_are_followed_to_their_end(factory, tokenizer):
    choice = [f"choice {i * 7919 % 4096} of them" for i in range(4096)]
    assert tokenizer.decode(write(factory, StructuredOutputsParams(choice=choice), 0)) in choice


def test_on_a_loop_equal_grammars_are_compiled_once_and_cancelled_with_the_last(bounded, monkeypatch):
    jobs, arun = [], bounded._pool.arun
    monkeypatch.setattr(bounded._pool, "arun", lambda job, then: jobs.append(job) or arun(job, then))

    async def work():
        masks = await asyncio.gather(*(bounded.acompile(StructuredOutputsParams(regex="once")) for _ in range(8)))
        assert len(jobs) == 1 and len({id(one._matcher) for one in masks}) == 8
        slow = StructuredOutputsParams(regex="".join(f"(p{i}|q{i})?" for i in range(12_000)))
        first, second = (asyncio.ensure_future(bounded.acompile(slow)) for _ in range(2))
        while bounded._pool._busy == 0:
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        assert len(bounded._pending) == 1 and bounded._pool._busy == 1 and not second.done()
        second.cancel()
        await asyncio.wait([second])
        await asyncio.to_thread(until, lambda: not bounded._pending and bounded._pool._busy == 0)
        assert len(jobs) == 2

    asyncio.run(work())


def test_the_memory_of_kept_grammars_is_bounded(monkeypatch):
    monkeypatch.setattr(constraints, "MAX_GRAMMAR_BYTES", 1000)
    built = ConstraintFactory(tokenizer_json(), VOCAB, [EOS])
    monkeypatch.setattr(built._pool, "run", lambda job: ChildJob(None, 400))
    for i in range(5):
        built.compile(StructuredOutputsParams(regex=f"b{i}"))
        assert sum(one.size for one in built._compiled.values()) <= 1000
    assert len(built._compiled) == 2


def test_the_characters_of_a_long_expression_are_not_counted_one_by_one():
    """Six expressions of 212 kB held up the event loop for 30 ms."""

    class Whole(str):
        def __iter__(self):
            pytest.fail("gone through")

    assert constraints._length(Whole("abc")) == 3
    assert constraints._length(["ab", Whole("c")]) == 3


def test_factories_of_one_model_share_what_is_read_of_its_tokenizer() -> None:
    """Reading it holds up the interpreter, and a server that swaps bundles serves meanwhile."""
    one, other = (ConstraintFactory(tokenizer_json(), VOCAB, [EOS]) for _ in range(2))
    assert one._tokenizer is other._tokenizer
    assert ConstraintFactory(tokenizer_json(), VOCAB, [])._tokenizer is not one._tokenizer
