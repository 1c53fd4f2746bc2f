"""pyproject.toml declares what llmc/ imports, and llmc/ imports what pyproject.toml declares."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from llmc.errors import DeviceError
from llmc.platforms import EXTRAS, require_names
from tests.tiers import full

pytestmark = full  # make lint runs these tests

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOR_DEVELOPERS = {"dev", "docs"}
"""Extras that no user installs."""

VENDORS = {
    "habana_frameworks": "Intel Gaudi's software: part of its container image",
    "hyperdex": "HyperAccel's toolchain: comes with the LPU",
    "nrtpy": "AWS Neuron's runtime: part of its machine image",
    "torch_xla": "needs another torch: requirements-torch-xla.txt has an environment for it",
}
"""Modules of software that no package index has, or that another environment holds."""

NOT_IMPORTED = {
    "httptools": "uvicorn parses with it; server/connections.py builds on that protocol",
    "jax-cuda13-plugin": "jax finds it: XLA's compiler for NVIDIA GPUs",
    "nvidia-cuda-nvcc": "its programs ptxas and nvlink are run",
    "s3fs": "fsspec imports it for s3:// addresses",
    "ziglang": "its compiler is run",
}
"""Declared distributions that llmc/ does not import, with the reason to install them."""


@cache
def imports(tree: Path) -> dict[str, set[str]]:
    """What the code below `tree` imports anywhere in its files ("jax.numpy") → the files; nothing of Python or llmc."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in tree.rglob("*.py"):
        for module in _modules(ast.parse(path.read_text())):
            if module.partition(".")[0] not in {*sys.stdlib_module_names, "llmc"}:
                found[module].add(path.relative_to(tree).as_posix())
    return found


def imported(tree: Path) -> dict[str, set[str]]:
    """Top-level modules of `imports` → the files."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, files in imports(tree).items():
        found[module.partition(".")[0]] |= files
    return found


@pytest.fixture(scope="module")
def providers() -> Mapping[str, Sequence[str]]:
    """Top-level modules of this environment → canonical names of the distributions that have them."""
    found = metadata.packages_distributions()
    return {module: [canonicalize_name(name) for name in names] for module, names in found.items()}


def _modules(code: ast.AST) -> Iterator[str]:
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def declared(*, extras: set[str]) -> dict[str, Requirement]:
    """The requirements of llmc with these extras, by canonical name."""
    lines = [*PROJECT["dependencies"], *(line for e in extras for line in PROJECT["optional-dependencies"][e])]
    requested = [Requirement(line) for line in lines if not line.startswith("llmc-compiler[")]
    return {canonicalize_name(one.name): one for one in requested}


def everyone() -> set[str]:
    """Extras for users."""
    return set(PROJECT["optional-dependencies"]) - FOR_DEVELOPERS


def undeclared(tree: Path, providers: Mapping[str, Sequence[str]]) -> dict[str, set[str]]:
    """Modules that code below `tree` imports and no declared distribution provides → the files."""
    known = {*declared(extras=everyone()), "pytest"}  # llmc.testing is for those who test a target of their own
    return {
        module: files
        for module, files in imported(tree).items()
        if module not in VENDORS and known.isdisjoint(providers.get(module, ()))
    }


def test_each_import_is_of_a_declared_distribution(providers: Mapping[str, Sequence[str]]) -> None:
    assert undeclared(ROOT / "llmc", providers) == {}


def test_an_undeclared_import_is_found_inside_a_function_too(
    tmp_path: Path, providers: Mapping[str, Sequence[str]]
) -> None:
    (tmp_path / "lazy.py").write_text("def f():\n    from markupsafe import escape\n")
    (tmp_path / "unknown.py").write_text("import json, no_such_module.part\n")
    (tmp_path / "fine.py").write_text("import os\nimport numpy.linalg\nfrom . import lazy\nfrom llmc import api\n")
    assert undeclared(tmp_path, providers) == {"markupsafe": {"lazy.py"}, "no_such_module": {"unknown.py"}}


def test_each_declared_distribution_is_imported_or_needed_for_a_stated_reason(
    providers: Mapping[str, Sequence[str]],
) -> None:
    used = {name for module in imported(ROOT / "llmc") for name in providers.get(module, ())}
    assert set(declared(extras=everyone())) - used == set(NOT_IMPORTED)


def test_lists_of_exceptions_hold_nothing_that_is_not_imported() -> None:
    assert set(VENDORS) <= set(imported(ROOT / "llmc"))


def test_the_hint_for_a_missing_module_names_an_extra_that_declares_it(providers: Mapping[str, Sequence[str]]) -> None:
    for module, extra in EXTRAS.items():
        names = {canonicalize_name(name) for name in providers.get(module, [module])}
        assert module == "libtpu" or names & set(declared(extras={extra})), f"{module} is not in the extra {extra}"
    assert "tpu" in declared(extras={EXTRAS["libtpu"]})["jax"].extras, "which has libtpu"


def test_private_modules_are_imported_only_of_distributions_with_an_exact_version(
    providers: Mapping[str, Sequence[str]],
) -> None:
    requested = declared(extras=everyone())
    private = {module for module in imports(ROOT / "llmc") if re.search(r"\._[a-z]", module)}
    tops = {module.partition(".")[0] for module in private} - set(VENDORS)
    assert {"jax", "torch", "ray"} <= tops
    for top in tops:
        (name,) = set(providers[top]) & set(requested)
        assert [one.operator for one in requested[name].specifier] == ["=="], (
            f"{top} has private parts that llmc imports"
        )


class Upstream:
    """A class of a package, as require_names sees it."""

    def __init__(self) -> None:
        self.cycle = None

    def on_headers_complete(self) -> None: ...


def test_a_package_with_all_names_that_llmc_relies_on_is_taken() -> None:
    require_names("uvicorn", Upstream, "on_headers_complete", "cycle")


def test_a_package_without_a_name_that_llmc_relies_on_is_refused() -> None:
    requested, version = declared(extras={"serve"})["uvicorn"], metadata.version("uvicorn")
    with pytest.raises(DeviceError) as refused:
        require_names("uvicorn", Upstream, "on_headers_complete", "send_400_response", "pipeline")
    assert str(refused.value) == (
        f"uvicorn {version} has no Upstream.send_400_response, Upstream.pipeline, which llmc needs; "
        f"install a version of {requested.name}{requested.specifier} that has it"
    )
