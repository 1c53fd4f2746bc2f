"""What a bundle was built from: complete, the same on every machine, and free of what is nobody's business."""

from __future__ import annotations

import getpass
import re
import shutil
import socket
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.bundle.manifest import read_manifest
from llmc.artifacts.digest import digest_file
from llmc.artifacts.store.store import Store
from llmc.compiler.pipeline import provenance as module
from llmc.compiler.pipeline.provenance import PACKAGES, find_model, model_name, remember_model
from llmc.testing.toy import write_toy
from tests.compiler.pipeline.test_pipeline import content
from tests.toy import Toy

REPO = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    toy = Toy.make(tmp_path_factory.mktemp("made"))
    toy.compile()
    return toy


def provenance(toy: Toy) -> dict[str, Any]:
    return dict(read_manifest(toy.bundle).provenance)


def test_it_states_what_was_requested(built: Toy) -> None:
    found = provenance(built)["buildDefinition"]
    assert found["buildType"] == "urn:llmc:compile:v1"
    assert found["externalParameters"] == {
        "model": "toy", "device": "fake", "quantize": "none", "dtype": "f32", "specialise": True,
        "plan": built.plan.digest(),
    }  # fmt: skip
    assert found["internalParameters"] == {
        "target": "fake", "executor": "fake", "toolchain": {"fake": "1.0"}, "isa": [],
    }  # fmt: skip


def test_it_states_every_file_of_the_checkpoint_by_its_content(built: Toy) -> None:
    dependencies = provenance(built)["buildDefinition"]["resolvedDependencies"]
    found = {item["name"]: item["digest"]["sha256"] for item in dependencies if item["name"].startswith("checkpoint/")}
    assert found == {
        f"checkpoint/{file.name}": digest_file(file).removeprefix("sha256:") for file in built.model.iterdir()
    }


def test_it_states_llmc_and_the_packages_with_their_versions(built: Toy) -> None:
    import numpy as np

    import llmc

    found = provenance(built)
    builder = found["runDetails"]["builder"]
    assert builder["version"]["llmc"] == llmc.__version__
    assert builder["version"]["numpy"] == np.__version__
    packages = {item["name"]: item for item in found["buildDefinition"]["resolvedDependencies"] if "uri" in item}
    assert set(packages) == {"llmc", *PACKAGES}
    assert re.fullmatch(r"[0-9a-f]{64}", packages["llmc"]["digest"]["sha256"])
    assert packages["numpy"]["uri"] == f"pkg:pypi/numpy@{np.__version__}"
    notes = [item["annotations"] for item in packages.values()]
    assert all("licenseExpression" in note or "licenseName" in note for note in notes)


def test_a_local_version_is_escaped_in_its_purl() -> None:
    assert module._dependency("Some_Thing", "2.1+cpu")["uri"] == "pkg:pypi/some-thing@2.1%2Bcpu"


def test_a_package_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module._package("llmc-has-no-such-package") is None


def test_the_list_of_packages_is_the_one_of_the_project() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    listed = {re.split(r"[<>=;\[ ]", line)[0] for line in project["optional-dependencies"]["compile"]}
    assert listed <= set(PACKAGES)
    assert set(PACKAGES) - listed <= {re.split(r"[<>=;\[ ]", line)[0] for line in project["dependencies"]}


# The same everywhere


def test_two_machines_make_the_same_bytes(built: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "another" / "place"
    elsewhere.mkdir(parents=True)
    shutil.copytree(built.model, elsewhere / "toy", copy_function=shutil.copy)
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("HOME", str(elsewhere))
    monkeypatch.setenv("USER", "somebody-else")
    monkeypatch.setattr(socket, "gethostname", lambda: "another-host")
    later = time.time() + 1e6
    monkeypatch.setattr(time, "time", lambda: later)
    other = Toy(Path("toy"), Store(elsewhere / "store"), Path("bundle"))
    other.compile(jobs=3)
    assert content(elsewhere / "bundle") == content(built.bundle)


@pytest.mark.parametrize("verify", ["sample", "all", "none"])
def test_no_path_host_user_or_time_is_in_a_manifest(tmp_path: Path, verify: str) -> None:
    toy = Toy.make(tmp_path)
    toy.compile(verify=verify)
    text = read_manifest(toy.bundle).to_bytes().decode()
    words = [str(tmp_path), str(Path.home()), socket.gethostname(), str(REPO), time.strftime("%Y-%m-%d")]
    assert not [word for word in words if len(word) > 3 and word in text]
    assert getpass.getuser() not in re.findall(r"\w+", text) or getpass.getuser() == "root"
    assert not re.findall(r'"(/[^"]*|~[^"]*|[^"]*/tmp/[^"]*)"', text)
    assert not re.findall(r'"(seconds|time|created|date|started\w*|finished\w*|host\w*)"', text)


@pytest.mark.parametrize(
    ("named", "name"),
    [
        (str, "toy"),
        (lambda model: f"{model}/", "toy"),
        (lambda model: f"{model}/../toy", "toy"),
        (lambda model: str(model / "config.json"), "config.json"),
        (lambda model: "org/name", "org/name"),
        (lambda model: "smollm2-demo", "smollm2-demo"),
    ],
)
def test_a_model_is_called_by_its_name_whatever_path_leads_to_it(
    tmp_path: Path, named: Callable[[Path], str], name: str
) -> None:
    assert model_name(named(write_toy(tmp_path / "toy"))) == name


def test_the_current_folder_has_a_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_toy(tmp_path / "toy"))
    assert model_name(".") == "toy"


def test_where_a_checkpoint_is_stays_on_this_machine(
    built: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = str(provenance(built)["checkpoint"])
    assert find_model(built.store, digest, "toy") == str(built.model)
    (entry,) = built.store.entries("local-model")
    assert entry.key.is_local
    assert find_model(Store(tmp_path / "another store"), digest, "toy") == "toy"
    store = Store(tmp_path / "store")
    monkeypatch.chdir(built.model.parent)
    for named, where in (("toy", str(built.model)), ("org/name", "org/name"), (str(built.model), str(built.model))):
        remember_model(store, digest, named)
        assert find_model(store, digest, "") == where


def test_a_store_without_room_does_not_fail_the_compile(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    remember_model(Store(tmp_path / "file" / "store"), "sha256:" + "0" * 64, "toy")
