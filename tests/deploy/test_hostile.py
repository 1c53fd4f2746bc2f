"""A model's name, and what users give, come from anywhere: they are values in every file, or nothing at all."""

from __future__ import annotations

import json
import shlex
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

from llmc.deploy.base import _environment
from llmc.deploy.quoting import label, require_label
from tests.deploy.bundles import facts, files, named
from tests.tiers import default_cases

NAMES = (
    "$(rm -rf /)", "`id`", "${{ secrets.KEY }}", "{{ .Values.x }}", "[[ facts ]] [% raw %]", "a\nRUN evil\n  b: c",
    "x\r\ny: z", "'single' \"double\"", "&anchor *alias !!python/object", "- a: {b: [c", "# comment", "%n %% \\",
    "back\\", "$HOME ${A:-b}", "Grüße 模型 😀 \u2028 \x85 \x7f \x00", "a" * 300, "", "---", "true", "1.0", "~",
    "' ; rm -rf / ; '",
)  # fmt: skip


@pytest.fixture(params=NAMES, ids=lambda name: name[:12].encode("unicode_escape").decode())
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def shown(name: str) -> str:
    """What the manifest's name is in files: without one it is that of the provenance."""
    return name or "toy"


@default_cases(8)
def test_kubernetes_and_kserve(name: str, tmp_path: Path) -> None:
    bundle = facts(tmp_path / "bundle", named(name))
    for kind in ("kubernetes", "kserve"):
        for path, text in files(kind, bundle).items():
            for document in yaml.safe_load_all(text):
                annotations = document.get("metadata", {}).get("annotations", {})
                if path in ("deployment.yaml", "serving-runtime.yaml"):
                    assert annotations["dev.llmc/model"] == bundle.model
                if "name" in document.get("metadata", {}):
                    assert require_label("name", document["metadata"]["name"]) == label(bundle.model)
    assert bundle.model == (name or bundle.manifest.provenance["model"])


def test_compose(name: str, tmp_path: Path) -> None:
    bundle = facts(tmp_path / "bundle", named(name))
    (text,) = files("compose", bundle).values()
    service = yaml.safe_load(text)["services"]["serve"]
    found = service["labels"]["dev.llmc.model"]
    assert found.replace("$$", "$") == bundle.model and "$" not in found.replace("$$", "")


def test_a_dockerfile_has_no_instruction_more(name: str, tmp_path: Path) -> None:
    def words(text: str) -> list[str]:
        return [line.split(" ")[0] for line in text.splitlines()]

    plain = files("docker", facts(tmp_path / "plain", named("toy")))["Dockerfile"]
    text = files("docker", facts(tmp_path / "bundle", named(name)))["Dockerfile"]
    assert words(text) == words(plain)
    (line,) = [line for line in text.splitlines() if line.startswith("LABEL ")]
    quoted = line.removeprefix("LABEL org.opencontainers.image.title=").removesuffix(" \\")
    assert quoted[0] == quoted[-1] == '"'
    inner = quoted[1:-1]
    for escape in ("\\\\", '\\"', "\\$"):
        inner = inner.replace(escape, "")
    assert not {"$", '"', "\\"} & set(inner)


def test_a_unit_has_no_setting_more(name: str, tmp_path: Path) -> None:
    def settings(text: str) -> dict[str, list[str]]:
        read = ConfigParser(interpolation=None, strict=False, delimiters="=")
        read.read_string(text)
        return {section: list(read[section]) for section in read.sections()}

    (plain,) = files("systemd", facts(tmp_path / "plain", named("toy"))).values()
    (text,) = files("systemd", facts(tmp_path / "bundle", named(name))).values()
    assert settings(text) == settings(plain)
    (described,) = [line for line in text.splitlines() if line.startswith("Description=")]
    assert "%" not in described.replace("%%", "") and not described.endswith("\\")


def test_ci(name: str, tmp_path: Path) -> None:
    if not name:
        return
    bundle = facts(tmp_path / "bundle", named(name))
    found = files("github-actions", bundle, model=name)
    (workflow,) = [text for path, text in found.items() if "/workflows/" in path]
    given = yaml.safe_load(workflow)["jobs"]["bundle"]["steps"][1]["with"]
    assert given["model"].replace("${{ '${{' }}", "${{") == name
    assert "${{" not in given["model"].replace("${{ '${{' }}", "")
    (text,) = (text for path, text in files("gitlab", bundle, model=name).items() if path.endswith(".yml"))
    (job,) = yaml.safe_load(text).values()
    assert job["variables"]["LLMC_MODEL"].replace("$$", "$") == name


def test_opea_sends_the_name_and_runs_nothing_of_it(name: str, tmp_path: Path) -> None:
    bundle = facts(tmp_path / "bundle", named(name))
    found = files("opea", bundle)
    programs = tmp_path / "programs"
    programs.mkdir()
    for program in ("curl", "docker"):
        (programs / program).write_text('#!/bin/sh\nfor word; do printf "%s\\036" "$word"; done\n')
        (programs / program).chmod(0o755)

    def words(script: str) -> list[str]:
        ran = subprocess.run(
            ["sh", "-c", found[script], script], capture_output=True, text=True, check=True,
            env={"PATH": f"{programs}:/usr/bin:/bin"},
        )  # fmt: skip
        return ran.stdout.split("\x1e")

    bodies = [json.loads(word) for word in words("query.sh") if word.startswith("{")]
    assert [body["model"] for body in bodies] == [bundle.model] * 4
    assert [type(body["messages"]) for body in bodies] == [str, list, str, list]
    launched = words("launch_vllm_service.sh")
    assert f'type=bind,readonly,target=/bundle,"source={bundle.bundle.path}"' in launched


def test_vllm(name: str, tmp_path: Path) -> None:
    if not name:
        return
    text = files("vllm", facts(tmp_path / "bundle"), model=name)["deployment.yaml"]
    deployment, _ = yaml.safe_load_all(text)
    assert deployment["spec"]["template"]["spec"]["containers"][0]["command"] == ["vllm", "serve", name]


def test_folders_of_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "a 'b\" $HOME %n: \\ é"
    bundle = facts(folder)
    (compose,) = files("compose", bundle).values()
    assert yaml.safe_load(compose)["services"]["serve"]["volumes"][0]["source"].replace("$$", "$") == str(folder)
    (unit,) = files("systemd", bundle).values()
    (command,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    _, verb, location, *_ = shlex.split(command.removeprefix("ExecStart="))
    assert (verb, location.replace("$$", "$").replace("%%", "%")) == ("serve", str(folder))


def test_a_template_writes_no_value_without_a_filter() -> None:
    with pytest.raises(TypeError, match="without a filter"):
        _environment().from_string("name: [[ name ]]").render(name="x")
    assert _environment().from_string("[[ name | yaml ]] [[ count ]]").render(name="x: y", count=3) == '"x: y" 3'
