"""Constraints: whatever the logits, the text has the form that was asked for."""

from __future__ import annotations

import json
import re
import sys
import threading

import jsonschema
import numpy as np
import pytest

from llmc.errors import ArtifactError, InputError
from llmc.runtime.sampling import SamplingParams, SequenceSampler, StructuredOutputsParams, sample
from llmc.runtime.sampling.guided import MAX_GRAMMARS, ConstraintFactory
from llmc.runtime.tokenizer import Tokenizer
from tests.toy import BYTES, EOS, VOCAB, tokenizer_json

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
    made = {tokenizer.decode(write(factory, StructuredOutputsParams(choice=choice), seed)) for seed in range(60)}
    assert made == set(choice)


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
        ({"regex": "a" * (1 << 20) + "b"}, "regex has 1048577 characters; at most 1048576"),
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


def test_grammars_are_compiled_once_and_forgotten_in_turn():
    made = ConstraintFactory(tokenizer_json(), VOCAB, [EOS])
    compiled, kind = [], made._matcher

    class Counting:
        grammar_from_regex = kind.grammar_from_regex

        def __new__(cls, *args, **options):
            compiled.append(args)
            return kind(*args, **options)

    made._matcher = Counting
    for _ in range(3):
        made.compile(StructuredOutputsParams(regex="a"))
    assert len(compiled) == 1
    for i in range(MAX_GRAMMARS):
        made.compile(StructuredOutputsParams(regex=f"b{i}"))
    assert len(made._compiled) == MAX_GRAMMARS
    made.compile(StructuredOutputsParams(regex="a"))
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
    with pytest.raises(InputError, match=r"not installed; run: pip install 'llmc\[serve\]'"):
        ConstraintFactory(tokenizer_json(), VOCAB, [EOS])
