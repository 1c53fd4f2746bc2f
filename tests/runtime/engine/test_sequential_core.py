"""The engine over a device that samples by itself: queueing, ends, cancellation, parameters, failures."""

from __future__ import annotations

from collections.abc import Generator as Tokens
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from llmc.errors import DeviceError, InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.engine import LLMEngine
from llmc.runtime.engine.requests import Request, Update
from llmc.runtime.engine.sampling.params import SamplingParams, StructuredOutputsParams
from llmc.runtime.engine.sequential_core import HOST, SequentialCore
from llmc.runtime.executors.base import ExecutorDescription
from llmc.runtime.executors.generating import GeneratingExecutor
from llmc.runtime.startup.opening import EngineOptions, open_engine
from llmc.runtime.startup.outcome import WarmUpOutcome
from llmc.runtime.startup.warming import Warming
from llmc.runtime.step import exact
from llmc.testing.toy import EOS, VOCAB
from tests.toy import Toy


class Counting(GeneratingExecutor):
    """A device that counts on from the prompt's last token; at `ends` it stops by itself."""

    description: ClassVar[ExecutorDescription] = ExecutorDescription({})
    parameters: ClassVar[tuple[str, ...]] = ("temperature", "top_k")
    defaults: ClassVar[Mapping[str, float | int]] = {"top_k": 1}
    takes: ClassVar[str] = "the parameters that a counting device has"

    def __init__(self, bundle: Bundle, ends: int | None = None, fails: int | None = None) -> None:
        super().__init__(bundle, 3, 64, 1)
        self.ends, self.fails = ends, fails
        self.reported: list[tuple[list[int], int, dict[str, Any]]] = []
        self.open = 0
        self.dies_at_end = False

    @classmethod
    def check(cls, bundle: Bundle) -> None:
        """Runs anything."""

    @property
    def executable(self) -> str:
        return "counting"

    def generate(self, prompt: Sequence[int], most: int, sampling: Mapping[str, float]) -> Tokens[int, None, None]:
        self.reported.append((list(prompt), most, dict(sampling)))
        self.open += 1
        try:
            for built in range(most):
                token = prompt[-1] + 1 + built
                if token == self.ends:
                    return
                if token == self.fails:
                    raise DeviceError("the device gave up")
                try:
                    yield token
                except GeneratorExit:
                    if self.dies_at_end:
                        raise DeviceError("the device is gone") from None
                    raise
        finally:
            self.open -= 1

    def memory(self) -> dict[str, int]:
        return {}

    def open_all(self) -> None:
        """Nothing is to be opened."""

    def close(self) -> None:
        """Nothing is held."""


@pytest.fixture(scope="module")
def bundle(toys: dict[str, Toy]) -> Bundle:
    return Bundle.open(toys["static"].bundle)


def engine(bundle: Bundle, device: GeneratingExecutor | None = None) -> LLMEngine:
    return open_engine(bundle, device or Counting(bundle), EngineOptions())


def add(
    to: LLMEngine, name: str, prompt: list[int], priority: int = 0, ends: tuple[int, ...] = (), **params: Any
) -> None:
    to.add(to.prepare(Request(name, prompt, SamplingParams(**params), ends, priority)))


def drain(of: LLMEngine) -> list[Update]:
    found = []
    while of.has_work:
        found += of.step()
    return found


def tokens(updates: Sequence[Update], name: str) -> list[int]:
    return [token for update in updates if update.request_id == name for token in update.token_ids]


def test_one_sequence_runs_at_a_time_in_order_of_priority_and_arrival(bundle: Bundle) -> None:
    device = Counting(bundle)
    requests = engine(bundle, device)
    for name, start, priority in (("late", 10, 1), ("first", 20, 0), ("second", 30, 0)):
        add(requests, name, [start], priority, max_tokens=2)
    assert (requests.stats.running, requests.stats.waiting, requests.stats.slots) == (0, 3, 1)
    news = drain(requests)
    assert [u.request_id for u in news] == ["first", "first", "second", "second", "late", "late"]
    assert tokens(news, "second") == [31, 32]
    assert [u.finish_reason for u in news] == [None, "length"] * 3
    assert device.open == 0
    assert requests.step() == [] and not requests.has_work


def test_the_device_hears_its_own_parameters_and_its_defaults(bundle: Bundle) -> None:
    device = Counting(bundle)
    requests = engine(bundle, device)
    add(requests, "a", [1], max_tokens=2)
    add(requests, "b", [1, 2], max_tokens=None, top_k=5, temperature=0.5, min_tokens=1)
    drain(requests)
    assert device.reported == [
        ([1], 2, {"temperature": 1.0, "top_k": 1}),
        ([1, 2], bundle.plan.limits.max_model_len - 2, {"temperature": 0.5, "top_k": 5}),
    ]


@pytest.mark.parametrize(
    "given",
    [
        {"top_p": 0.5}, {"min_p": 0.1}, {"seed": 3}, {"n": 2}, {"best_of": 2}, {"logprobs": 0}, {"ignore_eos": True},
        {"presence_penalty": 1.0}, {"frequency_penalty": 1.0}, {"logit_bias": {1: 1.0}}, {"typical_p": 0.5},
        {"bad_words": ["a"]}, {"allowed_token_ids": [1]}, {"structured_outputs": StructuredOutputsParams(regex="a")},
    ],
)  # fmt: skip
def test_other_parameters_are_refused_by_name(bundle: Bundle, given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(InputError, match=f"^{name} is not offered on this device: .* max_tokens, temperature, top_k"):
        engine(bundle).prepare(Request("r", [1], SamplingParams(**given)))


def test_what_the_host_meets_is_offered(bundle: Bundle) -> None:
    given = {"max_tokens": 9, "min_tokens": 1, "stop": ["x"], "stop_token_ids": [7], "truncate_prompt_tokens": 2}
    assert set(given) < set(HOST)
    engine(bundle).prepare(Request("r", [1], SamplingParams(**given)))


def test_stop_strings_and_end_tokens_end_the_devices_work(bundle: Bundle) -> None:
    device = Counting(bundle)
    requests = engine(bundle, device)
    text = bundle.tokenizer.decode([12])
    add(requests, "text", [10], max_tokens=9, stop=[text])
    add(requests, "token", [10], max_tokens=9, stop_token_ids=[13])
    add(requests, "end", [EOS - 2], max_tokens=9, ends=(EOS,))
    add(requests, "later", [10], max_tokens=9, stop_token_ids=[12], min_tokens=4)
    news = drain(requests)
    last = {u.request_id: u for u in news if u.finish_reason}
    assert {name: (u.finish_reason, u.stop_reason) for name, u in last.items()} == {
        "text": ("stop", text), "token": ("stop", 13), "end": ("stop", None), "later": ("length", None),
    }  # fmt: skip
    assert [len(tokens(news, name)) for name in ("text", "token", "end", "later")] == [2, 3, 2, 9]
    assert device.open == 0


def test_a_device_that_ends_by_itself_ends_the_sequence(bundle: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    requests = engine(bundle, Counting(bundle, ends=13))
    add(requests, "a", [10], max_tokens=9, min_tokens=5)
    news = drain(requests)
    assert tokens(news, "a") == [11, 12] and news[-1].finish_reason == "stop"
    assert "ended after 2 tokens, before min_tokens 5" in caplog.text


def test_cancelling_stops_the_device_or_takes_from_the_queue(bundle: Bundle) -> None:
    device = Counting(bundle)
    requests = engine(bundle, device)
    add(requests, "runs", [10], max_tokens=9)
    add(requests, "waits", [20], max_tokens=9)
    requests.step()
    assert device.open == 1 and requests.core.stats.kv_cache_usage == 2 / 64
    with pytest.raises(RuntimeError):
        requests.core.forget_slots()
    assert requests.cancel("waits")[0].finish_reason == "abort"
    assert requests.cancel("runs")[0].finish_reason == "abort"
    assert device.open == 0 and not requests.has_work and len(device.reported) == 1
    requests.core.forget_slots()


@pytest.mark.parametrize("at", [11, 12])
def test_a_device_that_fails_fails_one_sequence_alone(
    bundle: Bundle, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    requests = engine(bundle, Counting(bundle, fails=at))
    for name, start in (("fails", 10), ("next", 20)):
        add(requests, name, [start], max_tokens=3)
    news = drain(requests)
    ended = {u.request_id: u for u in news if u.finish_reason}
    assert {name: u.finish_reason for name, u in ended.items()} == {"fails": "error", "next": "length"}
    assert str(ended["fails"].error) == "the device gave up" and ended["next"].error is None
    assert tokens(news, "next") == [21, 22, 23] and len(tokens(news, "fails")) == at - 11
    assert "failed with its device: the device gave up" in caplog.text


def test_a_second_failure_in_a_row_ends_all_and_the_engine_can_be_used_again(bundle: Bundle) -> None:
    device = Counting(bundle, fails=11)
    requests = engine(bundle, device)
    for name in ("a", "b", "c"):
        add(requests, name, [10], max_tokens=3)
    assert requests.step()[-1].finish_reason == "error"
    with pytest.raises(DeviceError, match="gave up"):
        requests.step()
    assert not requests.core.has_work
    device.fails = None
    assert requests.core.complete([[20]], [SamplingParams(max_tokens=2)]) == [[21, 22]]


def test_a_device_that_fails_as_a_sequence_is_cancelled_fails_no_other(
    bundle: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    device = Counting(bundle)
    device.dies_at_end = True
    requests = engine(bundle, device)
    add(requests, "cancelled", [10], max_tokens=9)
    add(requests, "next", [20], max_tokens=2)
    requests.step()
    assert requests.cancel("cancelled")[0].finish_reason == "abort"
    assert "the device failed as a sequence ended: the device is gone" in caplog.text
    assert tokens(drain(requests), "next") == [21, 22]


def test_who_completes_prompts_hears_of_a_failure(bundle: Bundle) -> None:
    with pytest.raises(DeviceError, match="gave up"):
        engine(bundle, Counting(bundle, fails=12)).core.complete([[10]], [SamplingParams(max_tokens=4)])


def test_a_token_that_the_model_lacks_is_the_devices_error(bundle: Bundle) -> None:
    core = engine(bundle).core
    with pytest.raises(DeviceError, match=f"token {VOCAB}, which is not in its vocabulary of {VOCAB}"):
        core.complete([[VOCAB - 1]], [SamplingParams(max_tokens=2)])


def test_a_prompt_beyond_the_limit_is_refused(bundle: Bundle) -> None:
    longest = bundle.plan.limits.longest_prompt
    with pytest.raises(InputError, match=f"{longest + 1} tokens; this bundle takes at most {longest}"):
        engine(bundle).prepare(Request("r", [1] * (longest + 1), SamplingParams()))


def test_steps_are_recorded(bundle: Bundle) -> None:
    core = engine(bundle).core
    assert isinstance(core, SequentialCore) and core.max_num_seqs == 1
    core.add(0, [1, 2, 3], core.sampler([1, 2, 3], SamplingParams(max_tokens=2)))
    first, second = (core.step().record for _ in range(2))  # type: ignore[union-attr]
    assert (first.bucket, first.live_tokens, second.bucket, second.live_tokens) == ("1x3+0", 3, "1x1+64", 1)
    assert first.executable == "counting" and core.steps == 2


def test_steps_of_the_general_contract_give_the_devices_token(bundle: Bundle) -> None:
    device = Counting(bundle)
    assert int(device.run(exact("prompt", [0], [[5, 6]], [0]))[0].argmax()) == 7
    row = device.run(exact("decode", [0], [[9]], [2]))
    assert np.flatnonzero(row[0]).tolist() == [10] and device.reported[-1][0] == [5, 6, 9]
    device.copy_prefix(0, 0, 1)
    assert int(device.run(exact("decode", [0], [[3]], [1]))[0].argmax()) == 4
    with pytest.raises(InputError, match="slot 0 holds 2 tokens, not 5"):
        device.run(exact("decode", [0], [[3]], [5]))
    with pytest.raises(InputError, match="no room for one more"):
        device.run(exact("prompt", [0], [[1] * 64], [0]))
    for refused in (
        lambda: device.run_top(exact("decode", [0], [[3]], [1])), lambda: device.export_prefix(0, 1),
        lambda: device.import_prefix(0, []), lambda: device.nan_fill(0, 0, 1.0), lambda: device.copy_prefix(0, 0, 9),
    ):  # fmt: skip
        with pytest.raises(InputError):
            refused()


def test_it_warms_up_by_generating(bundle: Bundle) -> None:
    device = Counting(bundle)
    outcome = WarmUpOutcome(device, Warming(device, bundle.plan))
    outcome.run()
    assert not outcome.failed and outcome.phase("decode").warm == 1
    assert [most for _, most, _ in device.reported] == [1] * 4
