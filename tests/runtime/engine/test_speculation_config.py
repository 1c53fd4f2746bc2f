"""vLLM's speculative_config, as far as it means something here."""

from __future__ import annotations

from typing import Any

import pytest

from llmc.errors import InputError, UnknownNameError
from llmc.runtime.engine.speculation import SpeculativeConfig
from llmc.runtime.startup.opening import EngineOptions


@pytest.mark.parametrize(
    ("given", "shortest", "longest"),
    [
        ({}, 2, 4),
        ({"prompt_lookup_max": 3}, 3, 3),
        ({"prompt_lookup_min": 3}, 3, 3),
        ({"prompt_lookup_min": 1, "prompt_lookup_max": 7}, 1, 7),
        ({"method": "ngram"}, 2, 4),
        ({"model": "[ngram]"}, 2, 4),
        ({"model": "ngram"}, 2, 4),
    ],
)
def test_lengths_of_ngrams_as_in_vllm(given: dict[str, Any], shortest: int, longest: int) -> None:
    found = SpeculativeConfig.of({"num_speculative_tokens": 4, **given})
    assert found is not None
    assert (found.num_speculative_tokens, found.lookup_min, found.lookup_max) == (4, shortest, longest)
    assert found.method == "ngram"


def test_none_is_no_speculation_and_what_is_one_stays() -> None:
    assert SpeculativeConfig.of(None) is None
    one = SpeculativeConfig(3)
    assert SpeculativeConfig.of(one) is one
    assert EngineOptions(speculative_config={"num_speculative_tokens": 3}).speculative_config == one


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens 0 must be a whole number, at least 1"),
        ({"num_speculative_tokens": 2.5}, "num_speculative_tokens 2.5 must be a whole number"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens True must be a whole number"),
        ({"num_speculative_tokens": 65}, "num_speculative_tokens 65 is more than 64"),
        ({"num_speculative_tokens": 4, "prompt_lookup_min": 0}, "prompt_lookup_min 0 must be"),
        (
            {"num_speculative_tokens": 4, "prompt_lookup_min": 5, "prompt_lookup_max": 3},
            "prompt_lookup_min 5 is more than prompt_lookup_max 3; swap them",
        ),
        ({"method": "ngram"}, "speculative_config needs num_speculative_tokens"),
        ({"num_speculative_tokens": 4, "model": "org/draft"}, "knows no key 'model'; known: num_speculative_tokens"),
        ({"num_speculative_tokens": 4, "tokens": 4}, "knows no key 'tokens'"),
        ("ngram", "speculative_config must be a dict such as .*, not str"),
    ],
)
def test_what_makes_no_sense_is_refused(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        EngineOptions(speculative_config=given)


def test_another_method_lists_the_known_one() -> None:
    with pytest.raises(UnknownNameError, match="unknown speculation method 'eagle'; known: ngram"):
        SpeculativeConfig.of({"method": "eagle", "num_speculative_tokens": 4})


def test_json_of_a_command_line() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}'
    assert SpeculativeConfig.parse(text) == SpeculativeConfig(5, 3)
    for wrong, said in (("{", "is not JSON"), ("[1]", "is not an object"), ("null", "is not an object")):
        with pytest.raises(InputError, match=rf"--speculative-config .* {said}.*; give it as"):
            SpeculativeConfig.parse(wrong)
