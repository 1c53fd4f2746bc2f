"""`llmc run` and `llmc chat`: a model is compiled where it was not, and answers."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from llmc.cli import generate as run_module
from llmc.runtime.llm import BundleLLM
from llmc.runtime.prompts import Prompt
from tests.cli.helpers import Llmc

ON = ("--device", "fake")


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[Prompt]:
    """The prompts that models are given."""
    seen: list[Prompt] = []
    stream = BundleLLM.stream

    def noted(self, prompts, *arguments):
        seen.extend(prompts)
        return stream(self, prompts, *arguments)

    monkeypatch.setattr(BundleLLM, "stream", noted)
    return seen


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def user(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def test_a_checkpoint_is_compiled_once_and_answers(llmc: Llmc, toy: Path, requested: list[Prompt]) -> None:
    first = llmc("run", toy, "a", "b", *ON, "--max-tokens", 4)
    assert first.code == 0 and first.out.endswith("\n") and "from the store" not in first.err
    again = llmc("run", toy, "a b", *ON, "--max-tokens", 4)
    assert again.out == first.out
    assert all(line.endswith(("cached", "from the store")) for line in again.err.splitlines())
    assert requested == [{"messages": user("a b")}] * 2


def test_a_bundle_answers_as_llmc_generate_does(llmc: Llmc, bundle: Path, requested: list[Prompt]) -> None:
    built = llmc("run", bundle, "--raw", "ab", "--max-tokens", 4)
    assert built.out == llmc("generate", bundle, "--prompt", "ab", "--max-tokens", 4).out and requested[0] == "ab"
    assert llmc("run", bundle, "ab", "--system", "s", "--max-tokens", 4).code == 0
    assert requested[-1] == {"messages": [{"role": "system", "content": "s"}, *user("ab")]}


def test_a_prompt_may_be_piped(
    llmc: Llmc, bundle: Path, monkeypatch: pytest.MonkeyPatch, requested: list[Prompt]
) -> None:
    typed(monkeypatch, " ab\n")
    assert llmc("run", bundle, "--max-tokens", 2).code == 0 and requested == [{"messages": user("ab")}]
    typed(monkeypatch, "\n")
    assert llmc("run", bundle).failed(2) == "no prompt: standard input is empty"


def test_what_cannot_be_requested_is_one_error(llmc: Llmc, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "turns off" in llmc("run", bundle, "a", "--raw", "--system", "s").failed(2)
    assert "no such file or folder" in llmc("run", "nowhere", "a").failed(1)
    assert "no such file or folder" in llmc("chat", "nowhere").failed(1)
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    assert "llmc chat MODEL" in llmc("run", bundle).failed(2)


def test_a_conversation_has_its_turns(
    llmc: Llmc, toy: Path, monkeypatch: pytest.MonkeyPatch, requested: list[Prompt]
) -> None:
    typed(monkeypatch, "a\n\nb\n/reset\nc\n/exit\nd\n")
    built = llmc("chat", toy, *ON, "--max-tokens", 2)
    assert built.code == 0
    first, second, third = (prompt["messages"] for prompt in requested)
    assert first == user("a") and third == user("c")
    assert [turn["role"] for turn in second] == ["user", "assistant", "user"] and second[0::2] == user("a", "b")
    assert built.out.splitlines()[0] == second[1]["content"]


def test_the_earliest_turns_are_forgotten_where_the_context_is_full(
    llmc: Llmc, bundle: Path, monkeypatch: pytest.MonkeyPatch, requested: list[Prompt]
) -> None:
    monkeypatch.setattr(run_module, "LEAST", 2)
    typed(monkeypatch, "a\n" * 8)
    built = llmc("chat", bundle, "--max-tokens", 2)
    assert built.code == 0 and "turns are forgotten: the context is full" in built.err
    assert requested[-1]["messages"][0]["role"] == "user" and len(requested[-1]["messages"]) < 15
    typed(monkeypatch, "a" * 200 + "\n")
    assert "the message is longer than the" in llmc("chat", bundle).failed(2)


def test_ctrl_c_ends_an_answer_and_not_the_conversation(
    llmc: Llmc, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[list[str]] = []

    def answer(self, llm, prompt):
        said.append([turn["content"] for turn in prompt["messages"]])
        if len(said) == 1:
            raise KeyboardInterrupt
        return "x"

    monkeypatch.setattr(run_module.ChatCommand, "answer", answer)
    typed(monkeypatch, "a\nb\n")
    assert llmc("chat", bundle).code == 0 and said == [["a"], ["b"]]
