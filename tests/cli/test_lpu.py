"""LPUs from the command line: NUM_LPU_DEVICES, exit codes, and what is printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmc.cli.main import main
from tests.compiler import tiny
from tests.hyperdex import CASE, LpuHost, lpu

__all__ = ["lpu"]


@pytest.fixture(autouse=True)
def environment(lpu: LpuHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(lpu.store.root))
    monkeypatch.setenv("LLMC_HYPERDEX_PYTHON", str(lpu.settings.hyperdex_python))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_compile_and_generate(
    lpu: LpuHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NUM_LPU_DEVICES", "2")
    bundle = str(tmp_path / "bundle")
    assert main(["compile", str(lpu.model), "--max-model-len", "48", "--verify", "none", "-o", bundle, "--json"]) == 0
    built = json.loads(capsys.readouterr().out)
    assert (built["device"], built["native"], built["portable"]) == ("lpu", 1, 0)
    assert main(["generate", bundle, "--prompt", "Hello", "--max-tokens", "5", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["token_ids"] == tiny.greedy(CASE, answer["prompt_token_ids"], 5)
    assert main(["warmup", bundle]) == 0
    capsys.readouterr()
    assert main(["generate", bundle, "--prompt", "Hello", "--min-p", "0.1"]) == 2
    assert "min_p is not offered on this device" in capsys.readouterr().err
    monkeypatch.setenv("NUM_LPU_DEVICES", "1")
    assert main(["generate", bundle, "--prompt", "Hello"]) == 5
    assert "compiled for 2 LPUs, but NUM_LPU_DEVICES is 1" in capsys.readouterr().err


def test_without_hyperdex_the_guides_line_installs_it(
    lpu: LpuHost, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LLMC_HYPERDEX_PYTHON")
    assert main(["generate", str(lpu.bundle), "--prompt", "Hello"]) == 3
    error = capsys.readouterr().err
    assert 'uv pip install -i "$HYPERACCEL_INDEX" vllm-orion==0.9.0+orion' in error
    assert error.count("\n") == 1


def test_compile_errors_are_one_line_with_the_log(
    lpu: LpuHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_HYPERDEX", "error:compile")
    command = ["compile", str(lpu.model), "--device", "lpu:8", "--max-model-len", "48", "-o", str(tmp_path / "b"), "-q"]
    assert main(command) == 1
    error = capsys.readouterr().err
    assert "HyperDex failed (compile): RuntimeError: Failed to make network connection table. Its log: " in error
    assert main([*command[:3], "lpu:3", *command[4:]]) == 2
    assert "a power of two" in capsys.readouterr().err


def test_gpus_and_lpus_go_through_the_door_of_every_disaggregated(
    lpu: LpuHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One bundle, opened in HyperDex's disaggregated mode: device_map={"gpu": 2, "lpu": 2}."""
    folder, pair = str(tmp_path / "pair"), ["--prefill-device", "cuda:2", "--decode-device", "lpu:2"]
    assert main(["compile", str(lpu.model), *pair, "--max-model-len", "48", "--verify", "none", "-o", folder]) == 0
    assert "by itself if NUM_GPU_DEVICES=2 NUM_LPU_DEVICES=2 is set" in capsys.readouterr().out
    monkeypatch.setenv("NUM_GPU_DEVICES", "2")
    monkeypatch.setenv("NUM_LPU_DEVICES", "2")
    assert main(["generate", folder, "--prompt", "Hello", "--max-tokens", "5", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["token_ids"] == tiny.greedy(CASE, answer["prompt_token_ids"], 5)
    monkeypatch.setenv("FAKE_GPUS", "1")
    assert main(["generate", folder, "--prompt", "Hello"]) == 3
    assert "{'gpu': 2, 'lpu': 2} asked for, 4 LPUs and 1 GPUs found" in capsys.readouterr().err
    monkeypatch.delenv("FAKE_GPUS")
    assert main(["generate", folder, "--prompt", "Hello", "--prefill", str(lpu.bundle)]) == 2
    assert "takes whole prompts and keeps its cache" in capsys.readouterr().err
