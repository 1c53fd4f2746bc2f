"""Steps on an accelerator: the guide's four modes, their numbers, and who sees what is compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llmc.buckets.bucket import Bucket
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.base import Executor
from llmc.runtime.executors.hpu.executor import HpuOnDevice
from llmc.runtime.llm import BundleLLM
from llmc.runtime.step import pad
from llmc.testing.executors import PLAN, decode, prefill
from tests.runtime.executors.hpu.conftest import MODES, Host
from tests.tiers import default_cases, full

Opened = Callable[..., HpuOnDevice]
PROMPTS = [list(range(20)), [7, 8, 9], list(range(40, 70))]


def numbers(executor: Executor) -> list[np.ndarray]:
    """Logits of prompts in one step and in chunks, of decode steps, and what is cached then."""
    found = [prefill(executor, slot, tokens).copy() for slot, tokens in enumerate(PROMPTS)]
    held = [tokens[:16] for tokens in PROMPTS]
    found.append(decode(executor, [[1], [2], [3]], held).copy())
    executor.copy_prefix(1, 4, 3)
    found.append(decode(executor, [[4], [5]], [held[0][:15], PROMPTS[1]])[:2].copy())
    return [*found, *executor.export_prefix(4, 3), *executor.export_prefix(0, 16)]


@pytest.fixture(scope="module")
def on_cpu(bundle: Path) -> list[np.ndarray]:
    """The same on a host without an accelerator."""
    executor = open_executor(Bundle.open(bundle), slots=6, threads=1)
    assert executor.capabilities.in_place_of == "Gaudi"
    found = numbers(executor)
    executor.close()
    return found


@default_cases("HPU Graphs")
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_of_the_guide_gives_the_numbers_of_the_cpu(
    mode: str, host: Host, on_device: Opened, on_cpu: list[np.ndarray]
) -> None:
    host(mode)
    executor = on_device()
    assert str(executor.mode) == mode
    assert executor.capabilities.in_place_of == ""
    for got, wanted in zip(numbers(executor), on_cpu, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@full
def test_compiling_runs_nothing_and_no_step_compiles_after_it(host: Host, on_device: Opened) -> None:
    """PT_COMPILE_ONLY_MODE: all graphs are there before the first step, and the cache is untouched."""
    host("torch.compile")
    executor = on_device()
    executor.open_all()
    opened = executor.compilations.at_open
    assert {f"hpu: {e}" for e in executor.bundle.manifest.executables} <= set(opened)
    assert not any(tensor.cpu().any() for tensor in executor._cache.tensors)
    executor.compilations.ready()
    for bucket in PLAN.buckets:
        for slot in (0, 5):
            executor.run(pad(bucket, [slot], [[3] * bucket.query], [0]))
    executor.copy_prefix(5, 3, 2)
    executor.import_prefix(2, executor.export_prefix(3, 2))
    assert executor.compilations.count == 0


@pytest.mark.parametrize("mode", ["PyTorch eager mode", "HPU Graphs"])
def test_a_step_of_a_bucket_that_nothing_warmed_is_named_and_counted(mode: str, host: Host, on_device: Opened) -> None:
    host(mode)
    executor = on_device()
    executor.open_all()
    _, accelerator = executor.compilations.monitors
    executor.run(pad(PLAN.prompt[0], [0], [[1] * PLAN.prompt[0].query], [0]))
    executor.compilations.ready()
    before = accelerator.count()
    executor.run(pad(PLAN.prompt[0], [3], [[2]], [0]))
    assert executor.compilations.compiled == ()
    cold = Bucket("decode", 4, 1, 16)
    executor.run(pad(cold, [0], [[1]], [1]))
    executor.run(pad(cold, [0, 3], [[1], [1]], [2, 1]))
    assert set(executor.compilations.compiled) == {"hpu: decode batch=4 query=1 context=16"}
    assert accelerator.count() == before + executor.compilations.count


def test_each_step_that_compiled_is_logged_in_vllms_words_where_it_is_requested(
    host: Host, on_device: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    host(VLLM_HPU_LOG_STEP_GRAPH_COMPILATION="1", VLLM_HPU_LOG_STEP_CPU_FALLBACKS_ALL="true")
    executor = on_device()
    step = pad(PLAN.prompt[0], [0], [[1]], [0])
    executor.run(step)
    caplog.clear()
    executor.run(step)
    assert [record.message.partition(":")[0] for record in caplog.records] == ["VLLM_HPU_STEP_CPU_FALLBACK"]
    executor.run(pad(Bucket("prompt", 4, 4, 0), [0], [[1]], [0]))
    reported = next(r.message for r in caplog.records if r.message.startswith("VLLM_HPU_STEP_GRAPH_COMPILATION"))
    assert "('TotalNumber', " in reported
    assert reported.endswith("prompt batch=4 query=4 context=0")


def test_weights_lie_on_the_accelerator_once_and_the_guides_lines_say_what_took_memory(
    host: Host, on_device: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = host()
    with caplog.at_level(logging.INFO, "llmc"):
        executor = on_device()
        weights = accelerator.accelerator().in_use
        assert weights == executor.memory()["weights"] > 0
        executor.open_all()
    cache = executor.memory()["cache"]
    assert accelerator.accelerator().in_use == weights + cache
    lines = [r.message for r in caplog.records if " of device memory (" in r.message]
    assert [line.partition(" took ")[0] for line in lines] == [
        "Pre-loading model weights on hpu:0",
        "Initializing cache engine",
    ]
    assert all("/1 GiB used) and " in line and "of host memory (" in line for line in lines)
    executor.close()
    assert accelerator.accelerator().in_use == 0


def test_a_release_without_compile_only_mode_compiles_when_a_graph_runs_first(
    host: Host, on_device: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    host("torch.compile", FAKE_HPU_OLD="1")
    executor = on_device()
    shape = PLAN.prompt[0]
    executor.warm([(shape.phase, shape.batch, shape.query, shape.context)])
    assert "has no PT_COMPILE_ONLY_MODE: graphs are compiled on their first run" in caplog.text
    assert not [name for name in executor.compilations.at_open if "prompt" in name and "batch" in name]
    executor.run(pad(shape, [0], [[1]], [0]))
    assert f"hpu: {executor.bundle.executable('prompt', 1, 4, 0)}" in executor.compilations.at_open


def test_enforce_eager_is_taken_where_the_device_can_and_said_where_it_cannot(
    bundle: Path, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    with BundleLLM(bundle, 1, enforce_eager=True) as llm:
        assert not llm.executor.capabilities.eager
    assert "enforce_eager has no effect on hpu here: every step replays a compiled graph" in caplog.text
    host("HPU Graphs")
    caplog.clear()
    with BundleLLM(bundle, 1, enforce_eager=True) as llm:
        assert str(llm.executor.mode) == "PyTorch lazy mode"
        assert llm.executor.capabilities.graph_device is None
    assert "no effect" not in caplog.text
