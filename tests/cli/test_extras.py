"""Without an extra: each command that needs one says in one line which, and how to have it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import llmc as package
from llmc.platforms import EXTRAS, install_line
from llmc.testing.toy import VOCAB
from llmc.version import LEAST_PYTHON
from tests.artifacts.helpers import REPO
from tests.cli.helpers import Llmc
from tests.manifests import edit_manifest
from tests.tiers import default_cases

WITHOUT = """
import sys
from importlib import metadata

hidden, real = set(sys.argv.pop(1).split(",")), metadata.Distribution.from_name

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def from_name(name):
    if name in hidden:
        raise metadata.PackageNotFoundError(name)
    return real(name)

sys.meta_path.insert(0, Hidden())
metadata.Distribution.from_name = staticmethod(from_name)
from llmc.cli.main import run
run()
"""
"""Runs a command line on a host that lacks packages, named first: their modules and their metadata are not there."""


def without(packages: str, *arguments: object) -> tuple[int, str]:
    """Exit code and standard error."""
    command = [sys.executable, "-c", WITHOUT, packages, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stderr


def reported(said: tuple[int, str], extra: str, code: int = 3) -> None:
    assert said[0] == code, said
    assert "Traceback" not in said[1], said
    error = said[1].splitlines()[-1]
    assert error.startswith("llmc: error: ") and install_line(extra) in error, said


COMPILES = (
    ("torch", "onnxruntime", "compile"),
    ("transformers", "onnxruntime", "compile"),
    ("onnx", "onnxruntime", "compile"),
    ("torch", "hpu", "compile"),
    ("openvino", "openvino", "openvino"),
    ("openvino", "openvino:GPU", "openvino"),
    ("jax,jaxlib", "xla", "xla"),
    ("libtpu", "tpu:v5e-1x1", "tpu"),
    ("jax_cuda13_plugin,jax-cuda13-plugin", "cuda:h100", "cuda"),
)
FOR_RAY = ("--device", "fake", "--executor", "ray", "--max-model-len", "32", "--max-num-seqs", "3")
"""Sizes that no bundle here has: Ray is not asked for what is in the store."""

COMMANDS = (
    ("cryptography", ["cache", "keygen", "key"], "sign", 3),
    ("fsspec", ["cache", "push", "s3://bucket/folder"], "remote", 3),
    ("s3fs", ["cache", "push", "s3://bucket/folder"], "remote", 3),
    ("oras", ["cache", "push", "oci://localhost:1/name:tag", "bundle"], "remote", 3),
    ("matplotlib", ["plan", "toy", "--max-model-len", "32", "--plot", "plan.png"], "plot", 3),
    ("matplotlib", ["cache", "ls", "--plot", "store.html"], "plot", 3),
    ("jsonschema", ["plan", "--fleet", "fleet.yaml"], "fleet", 3),
    ("uvicorn", ["serve", "bundle"], "serve", 2),
    ("prometheus_client", ["serve", "bundle"], "serve", 2),
    ("opentelemetry", ["serve", "bundle", "--otlp-traces-endpoint", "http://localhost:4318/v1/traces"], "otel", 3),
    ("ray", ["serve", "bundle", "--executor", "ray"], "ray", 3),
    ("ray", ["compile", "toy", *FOR_RAY, "-o", "made"], "ray", 3),
)


@default_cases(1)
@pytest.mark.parametrize(("packages", "device", "extra"), COMPILES)
def test_a_compile_says_what_its_device_lacks(llmc: Llmc, toy: Path, packages: str, device: str, extra: str) -> None:
    sizes = ("hidden_size", "intermediate_size", "max_position_embeddings")
    counts = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = {"model_type": "llama", "vocab_size": VOCAB, **dict.fromkeys(sizes, 64), **dict.fromkeys(counts, 1)}
    (toy / "config.json").write_text(json.dumps(config))
    said = without(packages, "compile", toy, "--device", device, "--max-model-len", 32, "--max-num-seqs", 2, "-q")
    reported(said, extra)


@default_cases(2)
@pytest.mark.parametrize(
    ("packages", "executor", "extra"),
    [
        ("openvino", "openvino", "openvino"),
        ("openvino", "openvino-static", "openvino"),
        ("jax,jaxlib", "xla", "xla"),
        ("torch", "torch", "compile"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "verify", "bench"])
def test_what_opens_a_bundle_says_what_it_runs_on(
    llmc: Llmc, bundle: Path, packages: str, executor: str, extra: str, command: str
) -> None:
    edit_manifest(bundle, lambda manifest: manifest.update(executor=executor))
    more = ["--prompt", "hi"] if command == "generate" else []
    reported(without(packages, command, bundle, *more), extra)


@default_cases(1)
@pytest.mark.parametrize(("packages", "arguments", "extra", "code"), COMMANDS)
def test_other_commands_say_what_they_lack(
    llmc: Llmc, toy: Path, bundle: Path, here: Path, packages: str, arguments: list[str], extra: str, code: int
) -> None:
    (here / "toy").symlink_to(toy)
    (here / "fleet.yaml").write_text("models: []\n")
    reported(without(packages, *arguments), extra, code)


def test_every_extra_is_missed_by_a_command_of_these_tests() -> None:
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {case[2] for case in (*COMPILES, *COMMANDS)} == set(extras) - {"docs", "dev"}, "which are llmc's developers'"


def test_a_bundle_is_verified_without_the_extra_for_signatures_up_to_a_trusted_one(
    llmc: Llmc, bundle: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are compared with their digests; only a signature by a key that is trusted here needs more."""
    monkeypatch.setenv("LLMC_TRUSTED_KEYS", str(here / "trusted"))
    unsigned = without("cryptography", "cache", "verify", bundle)
    assert llmc("cache", "keygen", "key").code == llmc("cache", "sign", bundle, "--key", "key").code == 0
    assert unsigned[0] == without("cryptography", "cache", "verify", bundle)[0] == 0
    assert llmc("cache", "trust", "key.pub").code == 0
    reported(without("cryptography", "cache", "verify", bundle), "sign")


ELSEWHERE = {"habana_frameworks", "hyperdex", "nrtpy", "torch_xla", "pytest", "compression"}
"""Vendors', whose targets say where they come from; a test environment's; Python's own from 3.14 on."""


def test_every_optional_import_has_an_extra_that_its_error_names() -> None:
    """And every extra is one of pyproject.toml's."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    core = {Requirement(line).name.replace("pyyaml", "yaml") for line in project["dependencies"]}
    imported = set()
    for file in Path(package.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    assert imported - set(sys.stdlib_module_names) - core - {"llmc"} - ELSEWHERE <= set(EXTRAS)
    assert set(EXTRAS.values()) <= set(project["optional-dependencies"])


def test_a_python_that_is_too_old_is_reported_so() -> None:
    old = "import sys; sys.version_info = (3, 10, 12, 'final', 0); sys.version = '3.10.12 (main)'; import llmc"
    done = subprocess.run([sys.executable, "-c", old], cwd=REPO, capture_output=True, text=True, check=False)
    said = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert said.startswith("ImportError: llmc needs Python 3.11 or newer, and this is 3.10.12 (")
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={'.'.join(map(str, LEAST_PYTHON))}"
