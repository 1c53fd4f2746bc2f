"""The prompt's own log probabilities: echo with logprobs, and max_tokens 0, as lm-eval's local-completions asks."""

from __future__ import annotations

import pytest

from tests.server.stub_engine import refusal

PROMPT = "Hello you"


def choice_of(answer):
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice


def test_the_prompt_has_the_log_probabilities_that_generating_it_has(served):
    built = choice_of(served.complete(prompt=PROMPT, max_tokens=6, logprobs=2, temperature=0, return_token_ids=True))
    whole = [*built["prompt_token_ids"], *built["token_ids"]]
    scored = served.complete(prompt=whole, max_tokens=1, logprobs=2, echo=True, temperature=0)
    logprobs = choice_of(scored)["logprobs"]
    assert len(logprobs["tokens"]) == len(whole) + 1
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    start = len(built["prompt_token_ids"])
    found = logprobs["token_logprobs"][start : len(whole)]
    assert found == pytest.approx(built["logprobs"]["token_logprobs"], abs=1e-4)
    assert logprobs["tokens"][start : len(whole)] == built["logprobs"]["tokens"]
    usage = scored.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(whole), 1)


def test_the_text_is_the_prompt_and_what_follows_and_offsets_lie_in_it(served):
    plain = choice_of(served.complete(prompt=PROMPT, max_tokens=3, temperature=0))
    choice = choice_of(served.complete(prompt=PROMPT, max_tokens=3, temperature=0, echo=True, logprobs=0))
    assert choice["text"] == PROMPT + plain["text"]
    logprobs = choice["logprobs"]
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"]) and logprobs["text_offset"][0] == 0
    assert all(
        choice["text"].startswith(token, offset)
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
        if "\ufffd" not in token
    )


@pytest.mark.parametrize("prompt", [PROMPT, [72], [72, 256, 105]])
def test_nothing_is_generated_where_nothing_is_wanted(served, prompt):
    options = {"prompt": prompt, "max_tokens": 0, "temperature": 0, "return_token_ids": True}
    choice = choice_of(served.complete(**options))
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("", [], "length")
    choice = choice_of(served.complete(**options, echo=True, logprobs=1))
    count = len(choice["prompt_token_ids"])
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"]) == count
    assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"][1:])


def test_each_prompt_of_several_is_scored_as_it_is_alone(served):
    prompts = [[72, 105], [72, 101, 108, 108, 111]]
    options = {"max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "return_tokens_as_token_ids": True}
    together = served.complete(prompt=prompts, **options).json()["choices"]
    for prompt, choice in zip(prompts, together, strict=True):
        alone = choice_of(served.complete(prompt=prompt, **options))
        assert choice["logprobs"]["tokens"] == alone["logprobs"]["tokens"]
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(
            alone["logprobs"]["token_logprobs"][1:], abs=1e-4
        )
        assert alone["logprobs"]["tokens"][:-1] == [f"token_id:{index}" for index in prompt]


@pytest.mark.parametrize("more", [{"stream": True}, {"n": 2}, {"best_of": 2}])
def test_what_cannot_be_scored_is_refused(served, more):
    error = refusal(served.complete(max_tokens=1, logprobs=1, echo=True, **more))
    assert "leave out stream, n, best_of" in error["message"]
