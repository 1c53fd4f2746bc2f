"""What a compile for neuron leaves for those who serve with vLLM on Neuron."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmc.buckets.plan import Plan
from llmc.compiler.pipeline.planning import plan_for
from llmc.compiler.targets.neuron.on_target import host_files, keywords
from llmc.files import write_texts
from llmc.integrations import bucket_rules
from llmc.integrations.configuration import load
from llmc.settings import NEURON_FRAMEWORKS, Settings
from llmc.testing.toy import toy_plan

ROOT = Path(__file__).parents[4]
VLLM = """
import json, os, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.artifacts.third_party.helpers import make_neuron


class LLM:
    def __init__(self, model, **arguments):
        assert os.environ["VLLM_NEURON_CPU_COMPILE"] == "1"
        root = Path(os.environ["VLLM_CACHE_ROOT"])
        root.mkdir()
        seen = [model, os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"], arguments]
        (root.parent / "seen.json").write_text(json.dumps(seen))
        make_neuron(root / "neuron" / "compile_cache")
"""
"""A fake of vllm.LLM on vLLM Neuron (SDK 2.33): its compile leaves the cache of docs/servers.md."""


@pytest.fixture
def plan() -> Plan:
    return plan_for(None, max_model_len=1024, max_num_seqs=4, block_size=128, settings=Settings())


def test_the_servers_files_say_what_was_planned(tmp_path: Path, plan: Plan) -> None:
    texts = host_files(plan, "trn2", None)
    write_texts(tmp_path, texts, "files")
    server = bucket_rules("vllm-neuron")
    read = load(server, str(tmp_path / "config.yaml"), {}, {})
    assert (read.setup.limits.max_model_len, read.setup.limits.max_num_seqs) == (1024, 4)
    assert read.accepted(server).lists == server.accept(read.setup, server.from_plan(read.setup, plan)).lists
    assert "VLLM_NEURON_DISABLE_WARMUP_COMPILE=1" in texts["serve.env"]


def test_the_job_compiles_without_a_device_and_packs_the_cache(tmp_path: Path, plan: Plan) -> None:
    write_texts(tmp_path, host_files(plan, "trn2", None), "files")
    (tmp_path / "vllm.py").write_text(VLLM.format(root=str(ROOT)))
    tool = tmp_path / "llmc"
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} -m llmc.cli.main "$@"\n')
    tool.chmod(0o755)
    env = {
        **os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHON": sys.executable,
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "LLMC_CACHE_DIR": str(tmp_path / "store"),
    }  # fmt: skip
    command = ["sh", str(tmp_path / "cpu-compile.sh"), "the/model"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "packed vllm-neuron cache" in done.stdout and "key: sha256:" in done.stdout
    model, chip, arguments = json.loads((tmp_path / "seen.json").read_text())
    assert (model, chip) == ("the/model", "trn2")
    assert arguments["max_model_len"] == 1024
    assert arguments["additional_config"]["neuron_config"]["num_seqs_buckets"][-1] == 4
    assert arguments["enable_prefix_caching"] is False


def test_flags_are_keywords() -> None:
    flags = ["--max-model-len 8", "--no-enable-prefix-caching", "--enforce-eager", '--config {"a": [1]}', "--x y"]
    found = keywords(flags)
    assert found == {
        "max_model_len": 8, "enable_prefix_caching": False, "enforce_eager": True, "config": {"a": [1]}, "x": "y",
    }  # fmt: skip


def test_the_framework_chooses_the_server(tmp_path: Path, plan: Plan, caplog: pytest.LogCaptureFixture) -> None:
    nxd, transformers = NEURON_FRAMEWORKS
    texts = host_files(plan, "trn2", nxd)
    assert "context_encoding_buckets" in texts["config.json"]
    assert "cpu-compile.sh" not in texts
    assert host_files(plan, "trn2", transformers) == {}
    assert "no longer released" in caplog.text


def test_a_plan_that_the_server_does_not_take_leaves_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    long = plan_for(None, max_model_len=32768, max_num_seqs=4, settings=Settings())
    assert host_files(long, "trn2", None) == {}
    assert "no bucket file for vllm-neuron: " in caplog.text
    host_files(toy_plan(), "trn2", None)
