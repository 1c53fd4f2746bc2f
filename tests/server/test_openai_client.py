"""OpenAI's own client, sync and async, against the toy bundle and the real engine, however they are served."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from llmc.server.protocol.answers import ChatResponse, CompletionResponse
from tests.server.served import KEYS


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key=KEYS[0], max_retries=0) as client:
        yield client


def complete(client, **options):
    given = {"model": "org/toy", "prompt": "abcd", "max_tokens": 12, "temperature": 0, **options}
    given["extra_body"] = {"ignore_eos": True, **options.get("extra_body", {})}
    return client.completions.create(**given)


def chat(client, **options):
    messages = [{"role": "user", "content": "Hi"}]
    given = {"model": "org/toy", "messages": messages, "max_tokens": 8, "temperature": 0, **options}
    given["extra_body"] = {"ignore_eos": True, **options.get("extra_body", {})}
    return client.chat.completions.create(**given)


def test_lists_models_and_finds_one_with_a_slash(client):
    entry = client.models.list().data[0]
    assert (entry.id, entry.owned_by) == ("org/toy", "llmc")
    assert client.models.retrieve("org/toy") == entry
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_completes(client):
    answer = complete(client)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    assert answer == complete(client).model_copy(
        update={"id": answer.id, "created": answer.created, "usage": answer.usage}
    )


@pytest.mark.parametrize("options", [{}, {"seed": 5, "temperature": 1.0, "n": 3}, {"prompt": ["abcd", "x"]}])
def test_a_completions_stream_joins_to_the_same_text(client, options):
    whole = complete(client, **options)
    texts, reasons = {}, {}
    for chunk in complete(client, stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    assert texts == {c.index: c.text for c in whole.choices}
    assert reasons == {c.index: c.finish_reason for c in whole.choices}


@pytest.mark.parametrize("seed", range(6))
def test_a_chats_stream_joins_to_the_same_text_and_splits_no_character(client, seed):
    options = {"temperature": 1.5, "seed": seed, "max_tokens": 12, "extra_body": {"guided_regex": "[äß€😀a-c]{3,20}"}}
    whole = chat(client, **options)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}, **options))
    pieces = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
    text = whole.choices[0].message.content
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces[:-1])  # max_tokens may cut the last character
    assert text.rstrip("\ufffd").strip("äß€😀abc") == ""
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_prompt_tokens_that_were_in_the_cache_are_reported(client):
    prompt = "the same long prompt again"
    complete(client, prompt=prompt, max_tokens=2)
    details = complete(client, prompt=prompt, max_tokens=2).usage.prompt_tokens_details
    assert 0 < details.cached_tokens < len(prompt)


def test_stop_strings_end_the_text(client):
    text = complete(client).choices[0].text
    stop = text[3:5]
    choice = complete(client, stop=[stop]).choices[0]
    assert choice.text == text[: text.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


def test_logprobs(client):
    found = complete(client, logprobs=3, max_tokens=4).choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 4
    assert all(value <= 0 for value in found.token_logprobs)
    content = chat(client, logprobs=True, top_logprobs=2, max_tokens=4).choices[0].logprobs.content
    assert len(content) == 4
    for token in content:
        assert token.logprob == max(top.logprob for top in token.top_logprobs)  # greedy
        assert bytes(token.bytes).decode("utf-8", "replace") == token.token
    chunks = chat(client, logprobs=True, top_logprobs=2, max_tokens=4, stream=True)
    pieces = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert pieces == content


def test_structured_outputs_parse(client):
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": schema}}
    extra = {"ignore_eos": False, "seed": 1}
    for seed in range(3):
        answer = chat(client, response_format=form, max_tokens=None, temperature=1, seed=seed, extra_body=extra)
        text = answer.choices[0].message.content
        if answer.choices[0].finish_reason == "stop":
            assert json.loads(text)["a"] in ("x", "y")
    choice = complete(client, extra_body={"guided_choice": ["yes", "no"], "ignore_eos": False}).choices[0]
    assert choice.text in ("yes", "no")
    with pytest.raises(openai.BadRequestError, match="regex"):
        complete(client, extra_body={"guided_regex": "["})


@pytest.mark.parametrize(
    ("options", "error", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"prompt": "x" * 40}, openai.BadRequestError, "prompt"),
        ({"prompt": ""}, openai.BadRequestError, "prompt"),
        ({"prompt": [999]}, openai.BadRequestError, "prompt"),
        ({"logit_bias": {"999": 1}}, openai.BadRequestError, None),
        ({"n": 2}, openai.BadRequestError, "n"),
        ({"stream": True, "best_of": 2, "temperature": 1}, openai.BadRequestError, "best_of"),
    ],
)
def test_errors_are_the_clients_own(client, options, error, param):
    with pytest.raises(error) as caught:
        complete(client, **options)
    if param is not None:
        assert caught.value.param == param
    assert caught.value.body["message"] in str(caught.value)


def test_a_wrong_key_is_the_clients_error(served):
    url = f"http://127.0.0.1:{served.port}/v1"
    wrong = openai.OpenAI(base_url=url, api_key="other", max_retries=0)
    with wrong as client, pytest.raises(openai.AuthenticationError) as caught:
        client.models.list()
    assert caught.value.code == "invalid_api_key"


def test_many_at_once_and_async_get_their_own_answers(served):
    async def main():
        base = f"http://127.0.0.1:{served.port}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key=KEYS[0], max_retries=0) as client:

            async def whole(prompt):
                answer = await client.completions.create(model="org/toy", prompt=prompt, max_tokens=9, temperature=0)
                return answer.choices[0].text

            async def streamed(prompt):
                stream = await client.completions.create(
                    model="org/toy", prompt=prompt, max_tokens=9, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

            prompts = [f"prompt {i}" for i in range(12)]
            alone = [await whole(prompt) for prompt in prompts]
            together = await asyncio.gather(*map(whole, prompts), *map(streamed, prompts))
            assert together == alone * 2
            assert len(set(alone)) > 1

    asyncio.run(main())


@pytest.mark.parametrize("extra", [{}, {"logprobs": True}, {"return_token_ids": True, "n": 2, "temperature": 1}])
def test_answers_are_as_documented(client, extra):
    body = {"messages": "Hi", "max_tokens": 3, "ignore_eos": True, **extra}
    answer = client.post("/chat/completions", body=body, cast_to=object)
    assert documented(ChatResponse, answer) == answer
    if "logprobs" in extra:
        body["logprobs"] = 2
    answer = client.post("/completions", body={**body, "prompt": "Hi"}, cast_to=object)
    assert documented(CompletionResponse, answer) == answer


def documented(model, answer):
    """What of `answer` the document knows."""
    return model.model_validate(answer, strict=True).model_dump(exclude_unset=True)
