"""Parameters: vLLM's names and defaults, values normalised or refused by name, one choice's parameters."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest

from llmc.errors import InputError, UnknownNameError
from llmc.runtime.engine.sampling.params import (
    GuidedDecodingParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from tests.timing import least_cpu_seconds


def test_defaults_are_vllms():
    p = SamplingParams()
    assert (p.max_tokens, p.temperature, p.top_p, p.top_k, p.min_p, p.typical_p) == (16, 1.0, 1.0, 0, 0.0, 1.0)
    assert (p.repetition_penalty, p.presence_penalty, p.frequency_penalty, p.logit_bias) == (1.0, 0.0, 0.0, None)
    assert (p.seed, p.stop_strings, p.stop_token_ids, p.bad_words, p.allowed_token_ids) == (None, (), (), (), None)
    assert (p.ignore_eos, p.min_tokens, p.greedy, p.n, p.best_of, p.choices) == (False, 0, False, 1, None, 1)
    assert (p.logprobs, p.prompt_logprobs, p.truncate_prompt_tokens, p.structured_outputs) == (None, None, None, None)
    assert (p.skip_special_tokens, p.include_stop_str_in_output, p.detokenize) == (True, False, True)
    assert p.output_kind is RequestOutputKind.CUMULATIVE


def test_values_are_normalised():
    params = SamplingParams(
        top_k=-1, stop="x", stop_token_ids=[np.int64(3)], temperature=0, logit_bias={"5": 1}, max_tokens=None,
        allowed_token_ids=[7, 5], bad_words=["a"], logprobs=np.int32(4),
    )  # fmt: skip
    assert params.top_k == 0 and params.stop_strings == ("x",) and params.stop_token_ids == (3,)
    assert params.greedy and params.logit_bias == {5: 1.0} and params.max_tokens is None
    assert params.allowed_token_ids == (7, 5) and params.bad_words == ("a",) and params.logprobs == 4
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert type(SamplingParams(top_p=1).top_p) is float


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"max_tokens": 1.5}, "max_tokens must be an integer, not 1.5"),
        ({"max_tokens": True}, "max_tokens must be an integer"),
        ({"temperature": -0.1}, "temperature must be at least 0, not -0.1"),
        ({"temperature": math.nan}, "temperature must be"),
        ({"temperature": math.inf}, "temperature must be"),
        ({"temperature": 10**400}, "temperature must be a number"),
        ({"temperature": "1"}, "temperature must be a number"),
        ({"temperature": None}, "temperature must be a number"),
        ({"top_p": 0.0}, "top_p must be more than 0 and at most 1"),
        ({"top_p": 1.01}, "top_p must be more than 0 and at most 1"),
        ({"top_p": True}, "top_p must be a number"),
        ({"top_k": -2}, "top_k must be at least -1"),
        ({"min_p": -0.1}, "min_p must be at least 0 and at most 1"),
        ({"min_p": 1.1}, "min_p must be"),
        ({"typical_p": 0}, "typical_p must be more than 0 and at most 1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be more than 0"),
        ({"presence_penalty": 2.1}, "presence_penalty must be at least -2 and at most 2"),
        ({"frequency_penalty": -2.1}, "frequency_penalty must be"),
        ({"logit_bias": [1]}, "logit_bias must map"),
        ({"logit_bias": {"a": 1}}, "logit_bias token id must be an integer"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias token id must be an integer"),
        ({"logit_bias": {-1: 1}}, "logit_bias token id must be at least 0"),
        ({"logit_bias": {1: 101}}, "logit_bias must be at least -100 and at most 100"),
        ({"seed": "a"}, "seed must be an integer"),
        ({"seed": 1 << 64}, "seed must be"),
        ({"stop": ["a", ""]}, "stop must hold texts that are not empty"),
        ({"stop": [1]}, "stop must hold texts"),
        ({"stop": 5}, "stop must be a list"),
        ({"stop": "a", "detokenize": False}, "stop needs detokenize"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be at least 0"),
        ({"stop_token_ids": 3}, "stop_token_ids must be a list"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false"),
        ({"detokenize": "no"}, "detokenize must be true or false"),
        ({"skip_special_tokens": 0}, "skip_special_tokens must be true or false"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output must be true or false"),
        ({"min_tokens": -1}, "min_tokens must be at least 0"),
        ({"min_tokens": 17}, "min_tokens 17 is more than max_tokens 16"),
        ({"n": 0}, "n must be 1 to 1024, not 0"),
        ({"n": 1_000_000_000}, "n must be 1 to 1024"),
        ({"n": 2, "temperature": 0}, "n must be 1 at temperature 0, not 2: greedy choices are all the same"),
        ({"best_of": 2, "temperature": 0}, "best_of must be 1 at temperature 0"),
        ({"n": 3, "best_of": 2}, "best_of 2 is less than n 3"),
        ({"logprobs": -1}, "logprobs must be 0 to 20"),
        ({"logprobs": 21}, "logprobs must be 0 to 20"),
        ({"logprobs": True}, "logprobs must be an integer"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is not available .* logits of the last token only"),
        ({"allowed_token_ids": []}, "allowed_token_ids must name at least one id"),
        ({"bad_words": [""]}, "bad_words must hold texts that are not empty"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be at least 1"),
        ({"output_kind": "delta"}, "output_kind must be a RequestOutputKind"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs must be a StructuredOutputsParams"),
        ({"guided_decoding": "a"}, "guided_decoding must be a StructuredOutputsParams"),
    ],
)
def test_senseless_values_are_refused(params, message):
    with pytest.raises(InputError, match=message):
        SamplingParams(**params)


def test_guided_decoding_is_the_older_name_of_structured_outputs():
    form = GuidedDecodingParams(regex="a+")
    assert GuidedDecodingParams is StructuredOutputsParams
    assert SamplingParams(guided_decoding=form) == SamplingParams(structured_outputs=form)
    with pytest.raises(InputError, match="older name of structured_outputs; give one"):
        SamplingParams(guided_decoding=form, structured_outputs=form)
    with pytest.raises(InputError, match="may contradict each other"):
        SamplingParams(structured_outputs=form, allowed_token_ids=[1])


def test_from_optional_takes_none_for_the_default():
    assert SamplingParams.from_optional(temperature=None, top_p=0.5, stop=None) == SamplingParams(top_p=0.5)
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    assert SamplingParams.from_optional().max_tokens == 16
    with pytest.raises(UnknownNameError, match=r"unknown sampling parameter 'beam_width'; known: .*top_p"):
        SamplingParams.from_optional(beam_width=2)


def test_a_child_is_one_choice_with_a_seed_of_its_own():
    parent = SamplingParams(n=3, best_of=4, seed=10, top_p=0.5, stop=["x"])
    children = [parent.child(i) for i in range(3)]
    assert [c.seed for c in children] == [10, 11, 12]
    assert all((c.n, c.best_of, c.choices, c.top_p, c.stop) == (1, None, 1, 0.5, ("x",)) for c in children)
    assert parent.choices == 4 and parent.seed == 10
    assert SamplingParams(n=2).child(1).seed is None
    assert SamplingParams(n=3, seed=(1 << 64) - 1).child(2).seed == 1
    assert SamplingParams(n=3, seed=-1).child(1).seed == 0


def test_clones_and_replacements_are_equal_and_separate():
    params = SamplingParams(logit_bias={1: 2.0}, structured_outputs=StructuredOutputsParams(json_object=True))
    clone = params.clone()
    assert clone == params == dataclasses.replace(params) and clone.logit_bias is not params.logit_bias
    assert dataclasses.replace(params, logprobs=0).logprobs == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object; it has none"),
        ({"json_object": False}, "it has none"),
        ({"regex": "a", "choice": ["a"]}, "it has regex and choice"),
        ({"json": "{"}, "json is no JSON schema"),
        ({"json": "[1]"}, "a JSON schema is an object"),
        ({"json": '{"a":' * 5000}, "json is nested too deeply|json is no JSON schema"),
        ({"json": {"a": {1, 2}}}, "json is no JSON schema"),
        ({"json": {"minimum": math.nan}}, "json is no JSON schema"),
        ({"regex": 5}, "regex must be a text"),
        ({"regex": "\ud800"}, "regex holds a lone surrogate"),
        ({"choice": "ab"}, "choice must be a list"),
        ({"choice": []}, "choice must name 1 to 4096 texts, not 0"),
        ({"choice": ["a"] * 5000}, "choice must name 1 to 4096 texts, not 5000"),
        ({"choice": ["a", 1]}, "choice must hold texts"),
        ({"json_object": 1}, "json_object must be true or false"),
    ],
)
def test_structured_outputs_state_one_form(fields, message):
    with pytest.raises(InputError, match=message):
        StructuredOutputsParams(**fields)


def test_structured_outputs_know_their_kind():
    for fields in ({"json": {"type": "object"}}, {"regex": ""}, {"choice": ["a"]}, {"grammar": "start: /a/"}):
        assert [StructuredOutputsParams(**fields).kind] == list(fields)
    assert StructuredOutputsParams(json_object=True, regex=None).kind == "json_object"
    assert StructuredOutputsParams(json=' {"type" : "null"}') == StructuredOutputsParams(json={"type": "null"})


def test_construction_is_cheap():
    """Measured 7 µs; a request makes one for each of its choices."""
    given = {"temperature": 0.8, "top_p": 0.95, "max_tokens": 100, "stop": ["x"], "seed": 1}
    assert least_cpu_seconds(lambda: [SamplingParams(**given) for _ in range(1000)]) / 1000 < 100e-6


def test_importing_is_light():
    heavy = {"torch", "llguidance", "tokenizers", "fastapi"}
    code = f"import sys, llmc.runtime.engine.sampling; print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_a_devices_defaults_hold_for_what_is_not_given() -> None:
    defaults = {"top_p": 0.7, "top_k": 1}
    filled = SamplingParams(top_p=1.0).filled(defaults)
    assert (filled.top_p, filled.top_k, filled.max_tokens) == (1.0, 1, 16)
    assert SamplingParams(8, 0.5, 0.9).filled(defaults) == SamplingParams(8, 0.5, 0.9, 1)
    assert SamplingParams(top_k=4).child(0).clone().filled(defaults) == SamplingParams(top_p=0.7, top_k=4)
