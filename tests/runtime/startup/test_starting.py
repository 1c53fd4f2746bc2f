"""From exec to the first token as a specification: what runs beside what, and what is not there yet."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmc.artifacts.bundle.manifest import read_manifest
from llmc.artifacts.bundle.reader import IN_STORE, blob_path
from llmc.artifacts.store.layout import Layout
from llmc.errors import ArtifactError, InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.executors import executor_class
from llmc.runtime.executors.fake.executor import FakeExecutor
from llmc.runtime.executors.onnxruntime.executor import OnnxRuntimeExecutor
from llmc.runtime.llm import BundleLLM
from llmc.runtime.prompts import Prompts
from tests.artifacts.helpers import flip
from tests.devices import noting, use
from tests.manifests import edit_manifest
from tests.toy import Toy

GREEDY = SamplingParams(max_tokens=4, temperature=0)


@pytest.fixture
def bundle(toys: dict[str, Toy], tmp_path: Path) -> Path:
    """A copy, with one executable a bucket."""
    return Path(shutil.copytree(toys["static"].bundle, tmp_path / "copy"))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What fake executors, which may be opened in a thread here, do and in which thread."""
    seen: list[tuple[str, str]] = []
    use(monkeypatch, executor=noting(lambda name, _: seen.append((name, threading.current_thread().name))))
    return seen


def damage(bundle: Path, name: str) -> None:
    flip(blob_path(bundle, read_manifest(bundle).files[name]))


# The executor


def test_an_executor_that_may_opens_in_a_thread_and_its_first_executables_with_it(
    bundle: Path, events: list[tuple[str, str]]
) -> None:
    with BundleLLM(bundle) as llm:
        assert [name for name, _ in events] == ["check", "warm"]
        assert {thread for _, thread in events} == {"llmc-start"}
        assert llm.generate([[1, 2]], GREEDY)[0].finished


def test_others_open_in_the_thread_that_requests(bundle: Path, events: list[tuple[str, str]]) -> None:
    executor_class("fake").description = FakeExecutor.description  # the class is the one that the fixture made
    with BundleLLM(bundle):
        assert {thread for _, thread in events} == {threading.current_thread().name}


def test_native_runtimes_open_in_a_thread() -> None:
    assert OnnxRuntimeExecutor.description.opens_in_thread and not FakeExecutor.description.opens_in_thread


@pytest.mark.parametrize("name", ["weights", "tokenizer.json"])
def test_what_is_damaged_is_reported_as_ever_and_nothing_stays_open(
    bundle: Path, events: list[tuple[str, str]], name: str
) -> None:
    damage(bundle, name)
    with pytest.raises(ArtifactError, match=name.replace(".", r"\.")):
        BundleLLM(bundle)
    opened = [event for event, _ in events]
    assert opened.count("warm") == opened.count("close")
    assert "llmc-start" not in {thread.name for thread in threading.enumerate()}


def test_an_executor_of_the_future_is_reported_as_ever(bundle: Path) -> None:
    edit_manifest(bundle, lambda m: m.update(executor="quantum"))
    with pytest.raises(ArtifactError, match=r"unknown executor 'quantum'.*install that"):
        BundleLLM(bundle)


# Prompts


def test_the_tokenizer_is_loaded_and_nothing_is_started_for_the_chat_template(bundle: Path) -> None:
    opened, before = Bundle.open(bundle), psutil.Process().children()
    prompts = Prompts(opened)
    prompts.prepare()
    assert "tokenizer" in vars(opened) and "template" not in vars(prompts)
    prompts.render([{"role": "user", "content": "hi"}])
    assert len(psutil.Process().children()) == len(before) + 1
    prompts.close()
    assert len(psutil.Process().children()) == len(before)


def test_a_template_that_cannot_be_used_is_reported_to_who_uses_it(bundle: Path) -> None:
    damage(bundle, "chat_template.jinja")
    prompts = Prompts(Bundle.open(bundle))
    prompts.prepare()
    assert prompts.encode("plain")
    with pytest.raises(ArtifactError, match="chat_template"):
        prompts.render([{"role": "user", "content": "hi"}])


def test_a_bundle_without_tokenizer_or_template_is_prepared_too(bundle: Path) -> None:
    edit_manifest(bundle, lambda m: m.update(files={"weights": m["files"]["weights"]}))
    prompts = Prompts(Bundle.open(bundle))
    prompts.prepare()
    with pytest.raises(InputError, match="no chat template"):
        prompts.render([{"role": "user", "content": "hi"}])


# Imports

CHILD = """
    import json, sys
    from llmc import LLM, SamplingParams
    from llmc.runtime.startup import overlapped

    opening = overlapped.open_executor
    def opened(*args):
        before.update(sys.modules)
        return opening(*args)
    overlapped.open_executor = opened
    before = {}
    params = SamplingParams(max_tokens=2, temperature=0)
    llm = LLM(sys.argv[1])
    for _, update, _ in llm.stream([json.loads(sys.argv[2])], params):
        if update.token_ids:
            break
    print(json.dumps([sorted(before), sorted(sys.modules)]))
"""
NEVER = {
    "asyncio", "concurrent.futures.process", "fsspec", "filelock", "llmc.artifacts.store.leases",
    "llmc.artifacts.store.store",
    "llmc.buckets.planner", "llmc.buckets.strategies", "llmc.buckets.traffic", "llmc.cli", "llmc.compiler",
    "jinja2", "llmc.runtime.engine.async_engine", "llmc.runtime.engine.sampling.constraints", "llmc.server",
    "llmc.server.telemetry",
    "multiprocessing", "numpy.ma", "numpy.random", "numpy.testing", "onnx", "platformdirs", "pydantic", "requests",
    "rich", "secrets", "shutil", "tempfile", "torch", "transformers", "typer", "urllib.request",
}  # fmt: skip
"""Not on the way to a first token whose sampling draws nothing."""
LATER = {
    "llmc.runtime.engine.batched_core", "llmc.runtime.engine.engine", "llmc.runtime.engine.requests",
    "llmc.runtime.engine.sampling.batch",
    "llmc.runtime.engine.scheduling.bucketed", "llmc.runtime.engine.text_assembly", "llmc.runtime.text.tokenizer",
    "tokenizers",
}  # fmt: skip
"""Needed, but imported while the executor opens."""


def modules(bundle: Path, prompt: Any) -> tuple[set[str], set[str]]:
    """Modules that are there when the executor begins to open, and with the first token."""
    code = "\n".join(line.removeprefix("    ") for line in CHILD.splitlines())
    command = [sys.executable, "-c", code, str(bundle), json.dumps(prompt)]
    before, after = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return set(before), set(after)


def test_a_first_token_imports_what_it_needs_and_the_engine_while_the_executor_opens(bundle: Path) -> None:
    before, after = modules(bundle, "hi")
    assert {"numpy", "llmc.runtime.executors.fake.executor"} <= before, "what the thread needs is there when it starts"
    assert NEVER & after == set()
    assert LATER & before == set()
    assert after >= LATER


def test_a_first_token_of_a_conversation_needs_a_process_for_the_template_beside(bundle: Path) -> None:
    before, after = modules(bundle, {"messages": [{"role": "user", "content": "hi"}]})
    assert LATER & before == set()
    assert NEVER & after <= {"asyncio", "shutil", "tempfile"}, "which processes are started with"
    assert after >= LATER


def test_leases_are_looked_for_where_stores_keep_bundles(tmp_path: Path) -> None:
    assert Layout(tmp_path).bundles.name == IN_STORE
