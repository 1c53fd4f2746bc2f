"""What a compile for hpu leaves beside its bundle, for a Gaudi host."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from llmc.buckets.plan import Plan
from llmc.compiler.pipeline.compile import CompileResult
from llmc.compiler.pipeline.on_target import write_host_files
from llmc.compiler.pipeline.planning import plan_for
from llmc.compiler.targets import open_target
from llmc.compiler.targets.hpu.on_target import RecipeCompiler
from llmc.files import write_texts
from llmc.integrations import bucket_rules
from llmc.integrations.configuration import load
from llmc.settings import Settings
from llmc.testing.toy import toy_plan
from tests.toy import Toy

NAMES = ["environment", "arguments", "buckets.txt", "kubernetes-env.yaml", "finish.sh", "finish-job.yaml"]


@pytest.fixture
def plan() -> Plan:
    """One that vllm-gaudi takes."""
    return plan_for(None, max_model_len=1024, max_num_seqs=4, block_size=128, settings=Settings())


def written(folder: Path, plan: Plan, bundle: str = "bundle") -> dict[str, str]:
    texts = RecipeCompiler().host_files(folder / bundle, plan)
    write_texts(folder / f"{bundle}.hpu", texts, "files")
    return dict(texts)


def test_the_servers_files_say_what_was_planned(tmp_path: Path, plan: Plan) -> None:
    assert list(written(tmp_path, plan)) == NAMES
    server = bucket_rules("vllm-gaudi")
    read = load(server, str(tmp_path / "bundle.hpu"), {}, {})
    assert read.setup.limits == plan.limits
    assert read.accepted(server).dropped == ()
    planned = server.accept(read.setup, server.from_plan(read.setup, plan)).lists
    assert read.accepted(server).lists == planned


def test_the_job_is_a_shell_script_that_warms_the_bundle_up(tmp_path: Path, plan: Plan) -> None:
    texts = written(tmp_path, plan, "it's a bundle")
    folder = tmp_path / "it's a bundle.hpu"
    tool = tmp_path / "bin" / "llmc"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\nprintf "%s\\n" "$PT_HPU_LAZY_MODE" "$@"\n')
    tool.chmod(0o755)
    shell = shutil.which("sh") or "sh"
    ran = subprocess.run(
        [shell, str(folder / "finish.sh"), "--json"], env={"PATH": f"{tool.parent}:/usr/bin:/bin"}, check=True,
        capture_output=True, text=True,
    )  # fmt: skip
    assert ran.stdout.splitlines() == ["0", "warmup", str(tmp_path / "it's a bundle"), "--json"]
    assert "name: finish-it-s-a-bundle\n" in texts["finish-job.yaml"]
    assert 'command: [llmc, warmup, "/bundles/it\'s a bundle"]' in texts["finish-job.yaml"]


def test_a_plan_that_the_server_would_not_take_has_the_job_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmc.errors import InputError
    from llmc.integrations.vllm_gaudi.buckets import VllmGaudi

    def refuse(*_: Any) -> Any:
        raise InputError("no decode bucket is left")

    monkeypatch.setattr(VllmGaudi, "accept", refuse)
    with caplog.at_level(logging.WARNING):
        assert list(written(tmp_path, toy_plan())) == NAMES[-2:]
    assert "no bucket file for vllm-gaudi: no decode bucket is left" in caplog.text


def test_they_lie_beside_a_portable_bundle_and_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.compiler.targets.fake_on_target import FakeOnTargetCompiler
    from llmc.compiler.targets.hpu.on_target import host_files

    toy = Toy.make(tmp_path)
    result: CompileResult = toy.compile(device="fake:portable")
    assert write_host_files(result, open_target("fake:portable")).host_files == []
    monkeypatch.setattr(FakeOnTargetCompiler, "host_files", lambda self, *given: host_files(*given))
    found = write_host_files(result, open_target("fake:portable")).host_files
    assert [Path(name).name for name in found][-2:] == NAMES[-2:]
    assert {Path(name).parent for name in found} == {tmp_path / "bundle.fake"}
    assert all(Path(name).read_text() for name in found)
    assert (
        json.loads(json.dumps(write_host_files(result, open_target("fake:portable")).to_json()))["host_files"] == found
    )
