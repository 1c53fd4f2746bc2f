"""An LPU bundle over the fake HyperDex: the reference's tokens, what the device hears, and every way to fail."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmc.errors import ArtifactError, DeviceError, InputError
from llmc.runtime.certificate.certifying import Certifying, CertifyOptions
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.executors.lpu import executor as lpu_executor
from llmc.runtime.executors.lpu.executor import LpuExecutor
from llmc.runtime.llm import BundleLLM
from tests.compiler import tiny
from tests.hyperdex import CASE, LENGTH, LpuHost, another_version
from tests.tiers import default_cases
from tests.timing import PATIENCE_S

PROMPTS = [[5, 80, 3, 200, 17, 9, 9, 31, 4], [7], list(range(40, 66))]
GREEDY = {"temperature": 0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}


def ids(prompt: list[int]) -> dict[str, list[int]]:
    return {"prompt_token_ids": prompt}


def logs() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("llmc-hyperdex-*.log"))


@pytest.fixture(autouse=True)
def own_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture(scope="module")
def llm(lpu: LpuHost) -> Iterator[BundleLLM]:
    with BundleLLM(lpu.open()) as opened:
        yield opened


def test_greedy_tokens_are_those_of_transformers(llm: BundleLLM) -> None:
    params = SamplingParams(max_tokens=9, **GREEDY)
    outputs = llm.generate([ids(prompt) for prompt in PROMPTS], params)
    assert [o.outputs[0].token_ids for o in outputs] == [tiny.greedy(CASE, prompt, 9) for prompt in PROMPTS]
    assert [o.outputs[0].finish_reason for o in outputs] == ["length"] * 3
    assert llm.compilations == 0 and isinstance(llm.executor, LpuExecutor)
    assert llm.executor.memory()["executables"] > 100_000


def test_the_guides_defaults_hold_where_nothing_is_given(llm: BundleLLM) -> None:
    given = {"top_p": 0.7, "top_k": 1, "temperature": 1.0, "repetition_penalty": 1.2}
    default, named, plain = (
        llm.generate([ids(PROMPTS[0])], params)[0].outputs[0].token_ids
        for params in (None, SamplingParams(**given), SamplingParams(max_tokens=16, **GREEDY))
    )
    assert default == named != plain
    assert len(default) == 16


def test_a_text_ends_at_a_stop_string_and_streams(llm: BundleLLM) -> None:
    params = SamplingParams(max_tokens=9, **GREEDY)
    tokens = tiny.greedy(CASE, [5, 6, 7], 9)
    text = llm.get_tokenizer().decode(tokens[:4])
    pieces = [update.text for _, update, _ in llm.stream([ids([5, 6, 7])], params)]
    assert "".join(pieces) == llm.get_tokenizer().decode(tokens) and len(pieces) == 9
    stopped = llm.generate([ids([5, 6, 7])], SamplingParams(max_tokens=9, stop=text[-1], **GREEDY))[0].outputs[0]
    assert stopped.finish_reason == "stop" and len(stopped.token_ids) < 9


def test_leaving_a_stream_ends_the_devices_work_and_the_next_prompt_runs(llm: BundleLLM) -> None:
    for _ in llm.stream([ids(PROMPTS[0])], SamplingParams(max_tokens=30)):
        break
    again = llm.generate([ids(PROMPTS[1])], SamplingParams(max_tokens=3, **GREEDY))
    assert again[0].outputs[0].token_ids == tiny.greedy(CASE, PROMPTS[1], 3)


def test_prompts_and_texts_stay_within_max_length(llm: BundleLLM) -> None:
    with pytest.raises(InputError, match=f"the prompt has {LENGTH} tokens; this bundle takes at most {LENGTH - 1}"):
        llm.generate([ids([1] * LENGTH)])
    longest = llm.generate([ids([1] * (LENGTH - 3))], SamplingParams(max_tokens=None))[0].outputs[0]
    assert (len(longest.token_ids), longest.finish_reason) == (3, "length")


@pytest.mark.parametrize("given", [{"seed": 1}, {"min_p": 0.1}, {"n": 2}, {"ignore_eos": True}, {"logprobs": 1}])
def test_other_parameters_are_refused(llm: BundleLLM, given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(InputError, match=f"^{name} is not offered .* temperature, repetition_penalty; leave it out$"):
        llm.generate([ids([1])], SamplingParams(**given))


def test_gpus_prefill_where_they_are_requested(lpu: LpuHost) -> None:
    with BundleLLM(lpu.open(num_gpu_devices=2, num_lpu_devices=2)) as llm:
        built = llm.generate([ids(PROMPTS[0])], SamplingParams(max_tokens=4, **GREEDY))
    assert built[0].outputs[0].token_ids == tiny.greedy(CASE, PROMPTS[0], 4)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"num_lpu_devices": 4}, ArtifactError, "compiled for 2 LPUs, but NUM_LPU_DEVICES is 4; set that to 2"),
        ({"num_gpu_devices": 3}, DeviceError, r"HyperDex failed \(open\): .* 4 LPUs and 2 GPUs found"),
        (
            {"hyperdex_python": None},
            DeviceError,
            "not installed in this environment; .* uv pip install -i .*vllm-or",
        ),
        ({"hyperdex_python": "/nowhere/python"}, DeviceError, "LLMC_HYPERDEX_PYTHON=/nowhere/python cannot be run"),
    ],
)
def test_what_does_not_fit_the_host(
    lpu: LpuHost, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        BundleLLM(lpu.open(**settings))


def test_more_lpus_than_there_are(lpu: LpuHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_LPUS", "1")
    with pytest.raises(DeviceError, match=r"'lpu': 2} asked for, 1 LPUs and 2 GPUs found. Its log: "):
        BundleLLM(lpu.open())
    (log,) = logs()
    assert "Traceback" in log.read_text()


def test_an_interpreter_without_hyperdex_is_named(lpu: LpuHost, tmp_path: Path) -> None:
    plain = tmp_path / "python"
    plain.symlink_to(sys.executable)
    with pytest.raises(DeviceError, match=f"is not installed in {plain}; with HyperAccel's credentials"):
        BundleLLM(lpu.open(hyperdex_python=str(plain)))


def test_an_artifact_of_another_version_is_refused(lpu: LpuHost, tmp_path: Path) -> None:
    python = another_version(tmp_path, "1.6.0+cpu")
    with pytest.raises(ArtifactError, match=r"compiled with HyperDex 1.5.1, this host has 1.6.0"):
        BundleLLM(lpu.open(hyperdex_python=str(python)))


@default_cases(2)
@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("kill:import", r"was killed by signal 9 \(SIGKILL\) \(open\); run hyperdex-reset before"),
        ("error:from_pretrained", r"failed \(open\): RuntimeError: Failed to make network connection table. Its log: "),
        ("exit:from_pretrained", r"failed \(open\): SystemExit: 7"),
        ("babble:from_pretrained", r"gave the invalid answer b'not JSON' \(open\)"),
        ("hang:import", r"did not answer within 0.5 seconds \(open\) and was ended"),
    ],
)
def test_failures_while_opening(lpu: LpuHost, monkeypatch: pytest.MonkeyPatch, failure: str, message: str) -> None:
    monkeypatch.setenv("FAKE_HYPERDEX", failure)
    if failure.startswith("hang"):
        monkeypatch.setattr(lpu_executor, "OPEN_S", 0.5)
    with pytest.raises(DeviceError, match=message):
        BundleLLM(lpu.open())
    assert len(logs()) == 1


@default_cases(1)
@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("kill:2", r"was killed by signal 9 \(SIGKILL\) \(next\)"),
        ("error:2", r"failed \(next\): .* which ends: RuntimeError: Failed to make network connection table"),
        ("hang:2", r"did not answer within 1.5 seconds \(next\) and was ended; run hyperdex-reset"),
    ],
)
def test_a_device_that_fails_in_the_middle_is_opened_again(
    lpu: LpuHost, monkeypatch: pytest.MonkeyPatch, failure: str, message: str
) -> None:
    monkeypatch.setenv("FAKE_HYPERDEX", failure)
    params = SamplingParams(max_tokens=4, **GREEDY)
    with BundleLLM(lpu.open(hyperdex_seconds=1.5)) as llm:
        with pytest.raises(DeviceError, match=message):
            llm.generate([ids(PROMPTS[0])], params)
        monkeypatch.delenv("FAKE_HYPERDEX")
        built = llm.generate([ids(PROMPTS[1])], params)
    assert built[0].outputs[0].token_ids == tiny.greedy(CASE, PROMPTS[1], 4)
    assert len(logs()) == 1


def test_nothing_is_left_behind(lpu: LpuHost, tmp_path: Path) -> None:
    with BundleLLM(lpu.open()) as llm:
        process = llm.executor._hyperdex._process  # type: ignore[attr-defined]
        assert process.poll() is None
    assert process.poll() == 0
    assert not list(tmp_path.iterdir())


def test_the_process_ends_with_the_one_that_started_it(lpu: LpuHost) -> None:
    """A server that is killed closes the pipe, at whose end the worker ends."""
    with BundleLLM(lpu.open()) as llm:
        process = llm.executor._hyperdex._process  # type: ignore[attr-defined]
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0


def test_bundles_say_what_is_in_them(lpu: LpuHost) -> None:
    bundle = lpu.open()
    (executable,) = bundle.manifest.executables
    artifact = json.loads(bundle.files.read(executable.blob))
    assert (artifact["devices"], artifact["max_length"], artifact["hyperdex"]) == (2, LENGTH, "1.5.1")
    assert {path.split("/")[0] for path in artifact["files"]} == {"ckpt", "config", "inst", "param"}


def test_it_can_be_certified(lpu: LpuHost) -> None:
    """Random requests ask only for what an LPU offers; nothing is compiled."""
    found = Certifying(lpu.open(), certify=CertifyOptions(requests=40)).run()
    assert (found.requests.count, found.compilations) == (40, 0)
    assert all(executable.steps for executable in found.executables)
    assert "structured output" in found.requests.refused
