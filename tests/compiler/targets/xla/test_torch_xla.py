"""--lowering torch-xla: another environment makes the StableHLO, and the step is the same.

Here a stand-in for its worker hands out what JAX makes of the same program, with arguments shuffled and integers wide;
test_torch_xla_environment.py has what torch-xla itself makes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.errors import CompileError, DeviceError
from llmc.runtime.portable_program import FIXED_INPUTS, write_archive
from llmc.settings import Settings
from tests.compiler.targets.xla.bucket_steps import (
    BUCKETS,
    assert_right,
    compiled,
    flat_core,
    inputs,
    program,
    special,
    step_of,
)
from tests.tiers import full

pytestmark = full

PYTHON = Path(sys.executable)
"""A Python without torch-xla."""
each_bucket = pytest.mark.parametrize("bucket", BUCKETS)
STAND_IN = """
import pathlib, shutil, sys
for file in pathlib.Path({folder!r}).iterdir():
    shutil.copy(file, sys.argv[3])
"""


def jax_module(bucket: str, order: list[int]) -> bytes:
    """The program by JAX, with the inputs in `order` as arguments, and 64-bit integers as torch has them."""
    import jax
    import jax.numpy as jnp
    from jax import export

    core, given = flat_core(bucket), inputs(bucket)
    batch, _, context = BUCKETS[bucket]
    layers, _, heads, _, size = given[4].shape
    cache = [jax.ShapeDtypeStruct((batch, heads, context, size), jnp.float32)] * (2 * layers if context else 0)

    def run(*arguments: Any) -> tuple[Any, ...]:
        values = dict(zip(order, arguments, strict=True))
        ids, past, new, *rest = (values[i] for i in range(len(order)))
        numbers = (a.astype(jnp.int32) for a in (ids, past, new))
        given = dict(zip(FIXED_INPUTS, numbers, strict=True))
        out = core.run(given, lambda group, layer: rest[2 * layer + group], rest[len(cache) :])
        pairs = [entry for pair in zip(*out.entries, strict=True) for entry in pair]
        return (out.logits, *(t.astype(jnp.int64) if i else t for i, t in enumerate(out.top)), *pairs)

    with jax.enable_x64(True):
        rows = [jax.ShapeDtypeStruct(row.shape, jnp.int64) for row in given[:3]]
        every = [*rows, *cache, *given[6:]]
        built = export.export(jax.jit(run, keep_unused=True), platforms=("cpu",))(*(every[i] for i in order))
    return bytes(built.mlir_module_serialized)


def shuffled(bucket: str) -> list[int]:
    count = len(special(bucket)["graph_module"]["graph"]["inputs"])
    return [int(i) for i in np.random.default_rng(5).permutation(count)]


@cache
def stand_in_core(bucket: str) -> Any:
    from llmc.compiler.targets.xla.torch_xla import StableHlo, TorchXlaCore

    order = shuffled(bucket)
    return TorchXlaCore(special(bucket), StableHlo(jax_module(bucket, order), tuple(order)))


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts another script in the worker's place."""
    from llmc.compiler.targets.xla import torch_xla

    def put(script: str) -> None:
        file = tmp_path / "worker.py"
        file.write_text(script)
        monkeypatch.setattr(torch_xla.worker, "__file__", str(file))

    return put


# the environment


def test_without_an_environment_the_error_names_the_line_that_makes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmc.compiler.targets.xla.torch_xla import find_python

    monkeypatch.chdir(tmp_path)
    with pytest.raises(DeviceError, match=r"\.venv-torch-xla.*make torch-xla-env.*LLMC_TORCH_XLA_PYTHON") as found:
        find_python(None)
    assert found.value.exit_code == 3


def test_the_environment_may_lie_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.compiler.targets.xla.torch_xla import find_python

    monkeypatch.chdir(tmp_path)
    with pytest.raises(DeviceError, match=r"no Python at nowhere/python"):
        find_python(Settings.from_environment({"LLMC_TORCH_XLA_PYTHON": "nowhere/python"}).torch_xla_python)
    assert find_python(str(PYTHON)) == PYTHON
    default = tmp_path / ".venv-torch-xla/bin/python"
    default.parent.mkdir(parents=True)
    default.touch()
    assert find_python(None) == default


def test_a_python_without_torch_xla_is_reported_from_a_program_that_fails() -> None:
    from llmc.compiler.targets.xla.torch_xla import export, versions

    with pytest.raises(DeviceError, match=r"torch_xla.*make torch-xla-env"):
        export(write_archive(special("prompt")), PYTHON)
    with pytest.raises(DeviceError, match=r"no torch-xla.*make torch-xla-env"):
        versions(PYTHON)


# the worker


def test_what_is_no_program_is_an_error_with_the_workers_last_line() -> None:
    from llmc.compiler.targets.xla.torch_xla import export

    with pytest.raises(CompileError, match=r"torch-xla cannot export the program: not a portable program \(BadZipFile"):
        export(b"nothing of the kind", PYTHON)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import sys; sys.exit('much ado\\n\\nabout this\\n \\n')", "about this$"),
        ("raise SystemExit(1)", "it printed nothing"),
        ("import os; os.kill(os.getpid(), 9)", "signal 9$"),
        ("import os; open('operator', 'w').write('aten.x'); os.kill(os.getpid(), 9)", "signal 9 in aten.x, which"),
        ("", "left no module"),
    ],
)
def test_a_worker_that_fails_is_an_error(worker: Callable[[str], None], script: str, message: str) -> None:
    from llmc.compiler.targets.xla.torch_xla import export

    worker(script)
    with pytest.raises(CompileError, match=message):
        export(b"", PYTHON)


def test_a_worker_that_hangs_is_an_error(worker: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.compiler.targets.xla import torch_xla

    worker("import time; time.sleep(60)")
    monkeypatch.setattr(torch_xla, "LIMIT_SECONDS", 0.2)
    with pytest.raises(CompileError, match=r"within 0\.2 seconds"):
        torch_xla.export(b"", PYTHON)


# the module in the step


@each_bucket
def test_a_module_is_called_with_its_arguments_in_its_order_and_integers_as_wide_as_it_has_them(
    bucket: str, worker: Callable[[str], None], tmp_path: Path
) -> None:
    from llmc.compiler.targets.xla.torch_xla import torch_xla_core

    built = tmp_path / "made"
    built.mkdir()
    order = shuffled(bucket)
    (built / "module.stablehlo").write_bytes(jax_module(bucket, order))
    (built / "module.json").write_text(json.dumps({"arguments": order, "versions": {}}))
    worker(STAND_IN.format(folder=str(built)))
    core = torch_xla_core(program(bucket), *BUCKETS[bucket], PYTHON)
    assert core.weights == flat_core(bucket).weights
    step = compiled(core, bucket)
    assert_right(step(*inputs(bucket)), bucket)
    assert step.memory_analysis().alias_size_in_bytes >= 2 * inputs(bucket)[4].nbytes


def test_the_step_around_a_module_can_be_exported_for_other_platforms() -> None:
    import jax
    from jax import export

    core, given = stand_in_core("chunk"), inputs("chunk")
    blob = export.export(jax.jit(step_of(core, "chunk")), platforms=("cpu", "tpu", "cuda"))(*given).serialize()
    assert_right(export.deserialize(blob).call(*given), "chunk")


def test_a_module_that_is_not_of_the_program_is_refused() -> None:
    from llmc.compiler.targets.xla.torch_xla import StableHlo, TorchXlaCore

    order = shuffled("prompt")
    module = jax_module("prompt", order)
    for arguments, message in (
        (tuple(reversed(order)), r"not have the program's \d+ arguments: .* is tensor<.*>, not tensor<"),
        (tuple(order[:-1]), r"not have the program's \d+ arguments: \d+ of them"),
        ((*order[:-1], 999), "inputs that the program does not have"),
    ):
        with pytest.raises(CompileError, match=message):
            TorchXlaCore(special("prompt"), StableHlo(module, arguments))
    fewer = {**special("prompt")["graph_module"]["graph"]}
    fewer["outputs"] = fewer["outputs"][:-2]
    other = {**special("prompt"), "graph_module": {**special("prompt")["graph_module"], "graph": fewer}}
    with pytest.raises(CompileError, match=r"not have the program's 3 results: 5 of them"):
        TorchXlaCore(other, StableHlo(module, tuple(order)))
    with pytest.raises(CompileError, match="no StableHLO that this version reads"):
        TorchXlaCore(special("prompt"), StableHlo(b"ML\xefRnothing", tuple(order)))


def test_a_step_of_another_bucket_is_refused_by_the_inputs_name() -> None:
    with pytest.raises(CompileError, match=r"torch-xla's module takes token_ids as int32\[2,8\], not int32\[3, 1\]"):
        compiled(stand_in_core("prompt"), "decode")
