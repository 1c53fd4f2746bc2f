"""Two environments with two versions of ONNX Runtime, one store: what one packed is never run by the other unseen.

Not in the default run: `make test-newest`, or `pytest -m two_versions --other-python PYTHON`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.compiler.checkpoint import writers

pytestmark = pytest.mark.two_versions

ROOT = Path(__file__).parents[2]
LIMITS = ("--max-model-len", "48", "--max-num-seqs", "1", "--prompt-seq", "16,16,16", "--decode-seq", "48,48,48")
KINDS = {
    "packed with offsets": ("--specialise", "--quantize", "keep"),
    "packed": ("--kernels", "onnxruntime", "--quantize", "int8"),
    "as llmc made it": ("--quantize", "none"),
}


@dataclass(frozen=True)
class End:
    """One end of a range: a Python and the ONNX Runtime that it has."""

    python: Path
    version: str

    @classmethod
    def of(cls, python: Path) -> End:
        code = "import importlib.metadata; print(importlib.metadata.version('onnxruntime'))"
        ran = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
        return cls(python, ran.stdout.strip())

    def llmc(self, folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run a command, with the store of `folder`."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("LLMC_", "VLLM_"))}
        environment |= {"PYTHONPATH": str(ROOT), "LLMC_CACHE_DIR": str(folder / "store")}
        command = [self.python, "-m", "llmc", *map(str, arguments)]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def ends(request: pytest.FixtureRequest) -> tuple[End, End]:
    other = request.config.getoption("--other-python")
    assert other is not None, "name the other environment's Python: --other-python PYTHON"
    found = End.of(Path(sys.executable)), End.of(other.absolute())
    assert found[0].version != found[1].version, "both have the same version, and nothing is compared"
    return found


@pytest.fixture(scope="module")
def shop(ends: tuple[End, End], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model in 4-bit blocks, one store, and a bundle of each kind of each version."""
    folder = tmp_path_factory.mktemp("versions")
    scaled = {n: t * np.float32(0.15 if t.ndim == 2 else 1) for n, t in writers.weights().items()}
    types = {"embed": "Q4_1", "self_attn": "Q4_1", "mlp": "Q4_1"}
    writers.write_gguf(folder / "model.gguf", scaled, types=types)
    for kind, options in KINDS.items():
        for end in ends:
            command = (
                "compile",
                "model.gguf",
                "--device",
                "onnxruntime",
                *options,
                *LIMITS,
                "-o",
                f"{kind} {end.version}",
            )
            ran = end.llmc(folder, *command)
            assert ran.returncode == 0, ran.stderr
            built = ran.stdout + ran.stderr
            assert ", from the store 0;" in built, f"{end.version} took an executable of the other version\n{built}"
            again = end.llmc(folder, *command)
            assert "built 0," in again.stdout + again.stderr, "and finds its own"
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_each_version_runs_what_it_packed_from_one_store(ends: tuple[End, End], shop: Path, kind: str) -> None:
    for end in ends:
        ran = end.llmc(shop, "generate", f"{kind} {end.version}", "--prompt", "ab", "--max-tokens", 4)
        assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("command", ["generate", "verify"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("newer", [False, True], ids=["bundle of the other", "bundle of this one"])
def test_a_bundle_of_the_other_version_says_which_it_wants_and_what_to_do(
    ends: tuple[End, End], shop: Path, kind: str, newer: bool, command: str
) -> None:
    maker, opener = ends if newer else ends[::-1]
    bundle = f"{kind} {maker.version}"
    requested = ("--prompt", "ab") if command == "generate" else ("--all",)
    ran = opener.llmc(shop, command, bundle, *requested)
    assert ran.returncode == 5, ran.stdout + ran.stderr
    assert f"{bundle}: compiled with onnxruntime {maker.version}, this host has {opener.version}" in ran.stderr
    assert f"install onnxruntime=={maker.version}, or compile again: llmc compile" in ran.stderr
    assert "Traceback" not in ran.stderr
