"""Every pair of real executors: prompts on one, decode on the other, tokens equal to those of one device in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmc.artifacts.store.store import Store
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.runtime.bundle import Bundle
from llmc.runtime.disaggregated.worker import PrefillWorker
from llmc.runtime.engine.batched_core import BatchedCore
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.base import Executor
from tests.compiler import tiny
from tests.tiers import default_cases

DEVICES = ("onnxruntime", "openvino", "xla")
COUNT = 6
LONG = [(7 * index) % 250 + 1 for index in range(40)]
PROMPTS = [[5, 9, 2], LONG, [1], [*LONG[:24], 3, 4], [8, 6, 7, 5, 3, 0, 9], LONG]
"""Of several lengths, longer than a prompt bucket, and with beginnings in common."""


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("disaggregated")
    model, store = tiny.write_model(folder / "model", "llama"), Store(folder / "store")
    for device in DEVICES:
        options = CompileOptions.of(device=device, quantize="none", dtype="f32", verify="none")
        compile_bundle(str(model), folder / device, tiny.kinds_plan(), options, store, lambda _: None)
    return {device: folder / device for device in DEVICES}


@pytest.fixture(scope="module")
def workers(bundles: dict[str, Path]) -> Iterator[dict[str, PrefillWorker]]:
    built = {}
    for device, path in bundles.items():
        bundle = Bundle.open(path)
        built[device] = PrefillWorker(bundle, lambda bundle=bundle: open_executor(bundle, 4), 4)  # type: ignore[misc]
    yield built
    for worker in built.values():
        worker.close()


@pytest.fixture(scope="module")
def executors(bundles: dict[str, Path]) -> Iterator[dict[str, Executor]]:
    built = {device: open_executor(Bundle.open(path), 4) for device, path in bundles.items()}
    yield built
    for executor in built.values():
        executor.close()


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    return [tiny.greedy("llama", prompt, COUNT) for prompt in PROMPTS]


@default_cases(1)
@pytest.mark.parametrize("decode", DEVICES)
@pytest.mark.parametrize("prefill", DEVICES)
def test_tokens_are_those_of_one_device(
    prefill: str, decode: str, workers: dict[str, PrefillWorker], executors: dict[str, Executor],
    wanted: list[list[int]],
) -> None:  # fmt: skip
    executor, client = executors[decode], workers[prefill].client()
    engine = BatchedCore(executor.bundle.plan, executor, executor.bundle.size("vocab_size"), prefiller=client)
    greedy = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True)
    built: dict[int, list[int]] = {number: [] for number in range(len(PROMPTS) + 1)}
    for number, prompt in enumerate([*PROMPTS, LONG[:30]]):
        engine.add(number, prompt, engine.sampler(prompt, greedy))
    handed: set[int] = set()
    while engine.has_work:
        outcome = engine.step()
        assert outcome is not None
        if not outcome.record.handed:
            assert outcome.record.phase == "decode", "no prompt runs where tokens are decoded"
        handed |= set(outcome.handed)
        for token in outcome.tokens:
            assert token.token_id is not None
            built[token.sequence].append(token.token_id)
        if len(built[len(PROMPTS)]) == 2:
            engine.cancel(len(PROMPTS))
    assert [built[number] for number in range(len(PROMPTS))] == wanted
    assert handed == set(built)
    client.close()
