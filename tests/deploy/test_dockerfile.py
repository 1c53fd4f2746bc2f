"""What a builder of images found wrong, and what an image is told of the model that it holds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.deploy.bundles import facts, files, named


def dockerfile(folder: Path, model: str = "toy") -> str:
    return files("docker", facts(folder / "bundle", named(model)))["Dockerfile"]


def test_a_build_requests_no_registry_but_that_of_the_base(tmp_path: Path) -> None:
    text = dockerfile(tmp_path)
    assert not re.search(r"^# *syntax *=", text, re.MULTILINE), "BuildKit fetches that image from Docker Hub"
    stages = re.findall(r"^FROM (\S+)(?: AS (\S+))?$", text, re.MULTILINE)
    assert {image for image, _ in stages} - {stage for _, stage in stages} == {"scratch", "${BASE}"}


def test_packages_come_from_the_index_of_a_secret_that_no_layer_keeps(tmp_path: Path) -> None:
    steps = re.split(r"\n(?=[A-Z]+ )", dockerfile(tmp_path))
    installs = [step for step in steps if "pip install" in step]
    assert len(installs) == 2
    assert all(step.startswith("RUN --mount=type=secret,id=pip,target=/etc/pip.conf ") for step in installs)


def test_other_extras_of_the_server_leave_the_compiler_its_own(tmp_path: Path) -> None:
    """`--build-arg` reaches every stage that has an ARG of that name."""
    names = re.findall(r"^ARG (\w+)=", dockerfile(tmp_path), re.MULTILINE)
    assert len(names) == len(set(names)) == 3


@pytest.mark.parametrize("model", ["org/toy", "-x", 'a"b\n\\$(c)${D}é'])
def test_the_compiled_model_has_the_name_that_it_had(model: str, tmp_path: Path) -> None:
    """It is compiled from /model, which would be its name."""
    (said, compiled) = re.findall(r"^CMD (\[.*\])$", dockerfile(tmp_path, model), re.MULTILINE)
    assert json.loads(compiled) == [*json.loads(said), f"--served-model-name={model}"]


def test_a_server_cannot_change_the_bundle_that_it_has(tmp_path: Path) -> None:
    assert "COPY --from=compile /bundle /bundle\n" in dockerfile(tmp_path), "it is root's"
