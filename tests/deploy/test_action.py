"""The steps of llmc's GitHub action, run as a runner would run them."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmc.testing.toy import write_toy
from tests.tiers import full

ACTION = Path(__file__).parents[2] / "action.yml"
EXPRESSION = re.compile(r"\$\{\{ *([\w.-]+) *\}\}")


class Job:
    """One job of a runner, its temporary folder below `folder`."""

    def __init__(self, folder: Path, **inputs: str) -> None:
        self.folder, self.temp = folder, folder / "temp"
        action = yaml.safe_load(ACTION.read_text())
        given = {name.replace("_", "-"): value for name, value in inputs.items()}
        assert given.keys() <= action["inputs"].keys()
        self.values = {
            f"inputs.{name}": given.get(name, one.get("default", "")) for name, one in action["inputs"].items()
        }
        self.values["runner.temp"] = str(self.temp)
        self.steps: list[dict[str, Any]] = action["runs"]["steps"]
        programs = folder / "bin"
        for built in (self.temp, programs):
            built.mkdir(parents=True, exist_ok=True)
        program = programs / "llmc"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m llmc "$@"\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        self.path = f"{programs}{os.pathsep}{os.environ['PATH']}"

    def run(self, *names: str) -> None:
        """Run the steps of these names."""
        for step in self.steps:
            if step.get("name") in names:
                self._step(step)

    def output(self, step: str, name: str) -> str:
        return self.values[f"steps.{step}.outputs.{name}"]

    @property
    def summary(self) -> str:
        return (self.temp / "summary").read_text()

    def _step(self, step: dict[str, Any]) -> None:
        outputs = self.temp / "outputs"
        outputs.write_text("")
        env = {name: EXPRESSION.sub(lambda found: self.values[found[1]], value) for name, value in step["env"].items()}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("LLMC_", "VLLM_"))}
        files = {"GITHUB_OUTPUT": str(outputs), "GITHUB_STEP_SUMMARY": str(self.temp / "summary")}
        ran = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]], check=False, cwd=self.folder,
            env={**kept, **files, **env, "PATH": self.path, "PYTHONPATH": str(ACTION.parent)},
            capture_output=True, text=True,
        )  # fmt: skip
        assert ran.returncode == 0, (step["name"], ran.stdout, ran.stderr)
        for line in outputs.read_text().splitlines():
            name, _, value = line.partition("=")
            self.values[f"steps.{step['id']}.outputs.{name}"] = value


@full
def test_a_job_plans_compiles_certifies_and_reports(tmp_path: Path) -> None:
    toy = write_toy(tmp_path / "toy")
    (tmp_path / "traffic.csv").write_text("time,prompt_tokens,output_tokens\n0,10,4\n1,7,3\n")
    job = Job(
        tmp_path, model=str(toy), plan_flags="--max-model-len 16 --max-num-seqs 1", compile_flags="--device fake",
        traffic="traffic.csv", requests="20",
    )  # fmt: skip
    job.run("Plan", "Key", "Compile and verify", "Certify", "Report")
    key, graphs = job.output("key", "key"), job.summary.count("| native |")
    assert re.fullmatch("[0-9a-f]{64}", key)
    assert f"{graphs} built, 0 reused" in job.summary and "on 2 recorded requests; 0 uncovered" in job.summary
    assert "compilations: 0 once it was ready; not signed" in job.summary
    assert job.summary == Path(job.output("report", "report")).read_text()
    built = (job.temp / "certificate.json").read_bytes()
    job.run("Certify")
    assert (job.temp / "certificate.json").read_bytes() == built, "one of the same bundle is not made again"


def test_a_job_whose_compile_failed_says_so(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run("Report")
    assert job.summary == "### The job built no bundle. Read its log for the reason.\n"


def test_without_a_wheel_llmc_has_to_lie_beside_the_action(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="Set the input wheel"):
        Job(tmp_path).run("Install")
