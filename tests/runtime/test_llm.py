"""Offline inference as a specification: texts, stops, choices, log probabilities, prompts in every form."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from llmc.compiler.verification.toy_reference import ToyReference
from llmc.errors import InputError
from llmc.runtime import llm as llm_module
from llmc.runtime.engine.sampling.params import SamplingParams, StructuredOutputsParams
from llmc.runtime.llm import BundleLLM
from llmc.testing.toy import EOS
from tests.toy import Toy


@pytest.fixture(scope="module")
def llm(toy: Toy) -> Iterator[BundleLLM]:
    with BundleLLM(toy.bundle, keep_steps=True) as llm:
        yield llm


def greedy(max_tokens: int | None = 4, **params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **params)


def test_an_output_has_every_step_it_took_part_in(llm: BundleLLM) -> None:
    long, short = llm.generate([list(range(60, 90)), [7]], greedy(2))  # no other prompt here begins so
    assert [s.phase for s in long.steps].count("prompt") >= (1 if llm.executor.capabilities.exact else 3)
    assert [s.phase for s in short.steps] == ["prompt", "decode"]
    both = {number for step in [*long.steps, *short.steps] for number in step.requests}
    assert len(both) == 2
    assert all(min(both) in s.requests for s in long.steps) and all(max(both) in s.requests for s in short.steps)


def test_nothing_is_ever_compiled(llm: BundleLLM) -> None:
    llm.generate([[i] * n for i, n in enumerate((1, 5, 9, 17, 31))], greedy(12))
    assert llm.compilations == 0


def test_a_terminal_shows_a_bar_unless_it_is_not_wanted(
    llm: BundleLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(llm_module, "_BAR_AFTER_S", 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    llm.generate([[1], [2]], greedy(2), use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate([[1], [2]], greedy(2))
    assert "prompts" in capsys.readouterr().err


# Text


@pytest.mark.parametrize("seed", range(4))
def test_streamed_text_joined_is_the_text(llm: BundleLLM, seed: int) -> None:
    requested = ["Grüße aus", "日本語 😀", "plain", "a", "x y z"]
    params = SamplingParams(max_tokens=12, temperature=3.0, seed=seed)
    streamed = [""] * len(requested)
    finished: dict[int, Any] = {}
    for index, update, output in llm.stream(requested, params):
        assert index not in finished
        streamed[index] += update.text
        if output.finished:
            finished[index] = output
    whole = llm.generate(requested, params)
    for i, output in enumerate(whole):
        completion = output.outputs[0]
        assert streamed[i] == completion.text == finished[i].outputs[0].text
        assert completion.text == llm.bundle.tokenizer.decode(completion.token_ids)
        assert completion.token_ids == finished[i].outputs[0].token_ids
        assert output.prompt == requested[i]
        assert 0 < output.timings.first_token_s <= output.timings.total_s


def forced(llm: BundleLLM, text: str) -> dict[str, Any]:
    """Parameters under which the model writes `text` over and over: its bytes, biased upwards, and nothing else."""
    ids = set(llm.bundle.tokenizer.encode(text))
    return {"logit_bias": dict.fromkeys(ids, 100.0), "temperature": 0}


def test_a_stop_string_cuts_the_text_and_frees_the_slot(llm: BundleLLM) -> None:
    params = SamplingParams(max_tokens=10, stop="xx", **forced(llm, "x"))
    free = SamplingParams(max_tokens=10, **forced(llm, "y"))
    stopped, other = llm.generate(["one", "two"], [params, free])
    assert (stopped.outputs[0].text, stopped.outputs[0].finish_reason) == ("", "stop")
    assert len(stopped.outputs[0].token_ids) == 2
    assert (other.outputs[0].text, other.outputs[0].finish_reason) == ("y" * 10, "length")
    assert {s.live_rows for s in other.steps if s.phase == "decode"} == {1, 2}
    assert "".join(update.text for _, update, _ in llm.stream(["one"], params)) == ""


def test_a_stop_string_that_never_completes_is_shown(llm: BundleLLM) -> None:
    params = SamplingParams(max_tokens=3, stop=["xxxx", "z"], **forced(llm, "x"))
    (output,) = llm.generate("one", params)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("xxx", "length")


def test_the_end_token_ends_text_and_is_not_in_it(llm: BundleLLM) -> None:
    params = SamplingParams(max_tokens=5, temperature=0, logit_bias={EOS: 100.0})
    (output,) = llm.generate("one", params)
    assert (output.outputs[0].text, output.outputs[0].token_ids, output.outputs[0].finish_reason) == ("", [EOS], "stop")
    (longer,) = llm.generate("one", SamplingParams(max_tokens=5, min_tokens=2, temperature=0, logit_bias={EOS: 100.0}))
    assert len(longer.outputs[0].token_ids) == 3 and longer.outputs[0].token_ids[-1] == EOS
    ignoring = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0, logit_bias={EOS: 100.0})
    assert llm.generate("one", ignoring)[0].outputs[0].token_ids == [EOS] * 5


def test_prompts_in_every_form(llm: BundleLLM) -> None:
    ids = llm.bundle.tokenizer.encode("hi")
    forms: list[Any] = ["hi", ids, {"prompt": "hi"}, {"prompt_token_ids": ids}]
    outputs = llm.generate(forms, greedy(4))
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
    assert [o.prompt_token_ids for o in outputs] == [ids] * 4
    assert llm.generate(ids, greedy(4))[0].outputs == outputs[0].outputs
    assert llm.generate([], greedy(4)) == []
    messages = [{"role": "user", "content": "hi"}]
    (answer,) = llm.chat(messages, greedy(4))
    assert answer.prompt_token_ids == llm.bundle.tokenizer.encode("user: hi\nassistant:", add_special_tokens=False)
    assert llm.chat([messages, messages], greedy(4))[1].outputs == answer.outputs
    with pytest.raises(InputError, match="a prompt object needs 'prompt', 'prompt_token_ids' or 'messages'"):
        llm.generate({"text": "hi"})
    with pytest.raises(InputError, match="1 sampling parameters for 2 prompts"):
        llm.generate(["a", "b"], [greedy()])
    with pytest.raises(InputError, match="the prompt is empty"):
        llm.generate("")


ENTRIES: dict[str, Any] = {
    "generate": lambda llm, prompts: llm.generate(prompts, greedy(4)),
    "stream": lambda llm, prompts: [o for _, _, o in llm.stream(prompts, greedy(4)) if o.finished],
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_one_prompt_is_one_prompt_in_every_entry(llm: BundleLLM, entry: str) -> None:
    ask, text = ENTRIES[entry], "a text of 23 letters or"
    ids = llm.bundle.tokenizer.encode(text)
    (listed,) = ask(llm, [text])
    for one in (text, {"prompt": text}, ids, tuple(ids), np.array(ids), {"prompt_token_ids": np.array(ids)}):
        (alone,) = ask(llm, one)
        assert (alone.prompt_token_ids, alone.outputs) == (ids, listed.outputs)
    assert [o.prompt_token_ids for o in ask(llm, (p for p in ("a", "b")))] == [[64], [65]]
    for wrong in (None, 5, b"text", [b"text"], [True, False], [1.5], [["a"]], [None], [[1, "2"]], [{"prompt": ["a"]}]):
        with pytest.raises(InputError, match="prompt"):
            ask(llm, wrong)
    assert not llm.core.has_work


def test_what_is_no_conversation_and_no_parameters(llm: BundleLLM) -> None:
    message = {"role": "user", "content": "hi"}
    for wrong in ("hi", message, ["hi"], [[message], "hi"], [], [[]], None):
        with pytest.raises(InputError, match="messages"):
            llm.chat(wrong)  # type: ignore[arg-type]
    for tools in ("tool", {"type": "function"}, ["tool"]):
        with pytest.raises(InputError, match="tools must be a list of objects"):
            llm.chat([message], tools=tools)  # type: ignore[arg-type]
    for params in ({"max_tokens": 4}, "greedy", [{"max_tokens": 4}], 5):
        with pytest.raises(InputError, match="sampling_params must be SamplingParams"):
            llm.generate("a", params)  # type: ignore[arg-type]
    for priority in (1, "1", ["1"]):
        with pytest.raises(InputError, match="priority must be"):
            llm.generate("a", greedy(), priority=priority)  # type: ignore[arg-type]


def test_a_text_over_the_limit_names_the_limit(llm: BundleLLM) -> None:
    with pytest.raises(InputError, match="the prompt has 40 tokens; this bundle takes at most 31"):
        llm.generate("x" * 40)


# Choices


def test_n_choices_share_the_prompts_computation(llm: BundleLLM) -> None:
    params = SamplingParams(n=3, max_tokens=5, temperature=1.0, seed=7, ignore_eos=True)
    (output,) = llm.generate([list(range(20))], params)
    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 3
    prompt_tokens = sum(s.live_tokens for s in llm.records if s.phase == "prompt")
    assert prompt_tokens < 2 * 20, "computed once; the others copy it"
    alone = [llm.generate([list(range(20))], params.child(i))[0].outputs[0].token_ids for i in range(3)]
    assert alone == [c.token_ids for c in output.outputs]


def test_best_of_returns_the_most_probable(llm: BundleLLM) -> None:
    base = {"max_tokens": 4, "temperature": 1.0, "seed": 3, "logprobs": 0, "ignore_eos": True}
    (every,) = llm.generate("hello", SamplingParams(n=4, **base))
    (best,) = llm.generate("hello", SamplingParams(n=2, best_of=4, **base))
    ranked = sorted(every.outputs, key=lambda c: -(c.cumulative_logprob or 0))
    assert [c.token_ids for c in best.outputs] == [c.token_ids for c in ranked[:2]]
    assert [c.index for c in best.outputs] == [0, 1]
    assert [c.text for c in best.outputs] == [c.text for c in ranked[:2]]


def test_logprobs_are_the_models(llm: BundleLLM, trusted: ToyReference) -> None:
    (output,) = llm.generate([[5, 6, 7]], greedy(3, logprobs=2, repetition_penalty=1.3))
    choice = output.outputs[0]
    assert choice.logprobs is not None and len(choice.logprobs) == 3
    total = 0.0
    for position, (token, entry) in enumerate(zip(choice.token_ids, choice.logprobs, strict=True)):
        prompt = [5, 6, 7, *choice.token_ids[:position]]
        row = trusted.logits(prompt, [len(prompt) - 1])[0].astype(np.float64)
        wanted = row - np.log(np.exp(row - row.max()).sum()) - row.max()
        for index, found in entry.items():
            assert found.logprob == pytest.approx(wanted[index], abs=1e-4)
            assert found.rank == 1 + int((wanted > wanted[index]).sum())
        assert token in entry and 2 <= len(entry) <= 3
        total += entry[token].logprob
    assert choice.cumulative_logprob == pytest.approx(total)


def test_include_stop_str_in_output(llm: BundleLLM) -> None:
    params = SamplingParams(max_tokens=10, stop="xx", include_stop_str_in_output=True, **forced(llm, "x"))
    assert llm.generate("one", params)[0].outputs[0].text == "xx"
    later = SamplingParams(max_tokens=10, stop="xx", min_tokens=4, **forced(llm, "x"))
    choice = llm.generate("one", later)[0].outputs[0]
    assert choice.stop_reason == "xx" and len(choice.token_ids) >= 5


def test_a_stop_token_is_named_as_the_reason(llm: BundleLLM) -> None:
    first = llm.generate("one", greedy(1)).pop().outputs[0].token_ids[0]
    choice = llm.generate("one", greedy(4, stop_token_ids=[first])).pop().outputs[0]
    assert (choice.finish_reason, choice.stop_reason, choice.text) == ("stop", first, "")


def test_truncated_prompts_keep_their_end(llm: BundleLLM) -> None:
    (output,) = llm.generate([list(range(60))], greedy(2, truncate_prompt_tokens=5))
    assert output.prompt_token_ids == list(range(55, 60))


def test_a_seed_of_the_llm_makes_unseeded_requests_repeatable(toy: Toy) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.5)
    built = []
    for _ in range(2):
        with BundleLLM(toy.bundle, seed=11) as llm:
            built.append([o.outputs[0].token_ids for o in llm.generate(["a", "b"], params)])
    assert built[0] == built[1] and built[0][0] != built[0][1]


def test_a_stream_left_early_leaves_nothing_behind(llm: BundleLLM) -> None:
    stream = llm.stream(["one", "two"], greedy(20))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not llm.core.has_work and not llm.engine.has_work
    assert llm.generate("one", greedy(2))[0].finished


def test_what_cannot_run_leaves_nothing_of_its_group_behind(llm: BundleLLM) -> None:
    with pytest.raises(InputError, match="the prompt is empty"):
        llm.generate(["one", ""], greedy(2))
    assert not llm.engine.has_work


def test_an_interrupted_step_leaves_the_engine_usable(
    llm: BundleLLM, trusted: ToyReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = type(llm.executor).run
    with monkeypatch.context() as patch:
        steps = iter(range(3))

        def interrupted(self: Any, step: Any) -> Any:
            if next(steps, None) is None:
                raise KeyboardInterrupt
            return run(self, step)

        patch.setattr(type(llm.executor), "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2, 3], [4]], greedy(8))
    assert not llm.engine.has_work and not llm.core.has_work
    assert llm.generate([[1, 2, 3]], greedy(4))[0].outputs[0].token_ids == trusted.greedy([1, 2, 3], 4)


def test_a_hostile_grammar_is_refused_and_the_next_one_followed(llm: BundleLLM) -> None:
    """llguidance compiles chains of definitions with recursion, which would end this process."""
    last = 6000
    defs = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(last)} | {f"d{last}": {"type": "integer"}}
    hostile = StructuredOutputsParams(json={"$ref": "#/$defs/d0", "$defs": defs})
    with pytest.raises(InputError, match="nested or chained too deeply for a stack of 16 MiB"):
        llm.generate(["a"], greedy(structured_outputs=hostile))
    assert (
        llm.generate(["a"], greedy(structured_outputs=StructuredOutputsParams(choice=["ab"])))[0].outputs[0].text
        == "ab"
    )
