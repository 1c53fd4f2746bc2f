"""Attention as a kernel on cards: compiled here, in the same portable program whose plain form is verified on CPU."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from llmc.artifacts.store.store import Store
from llmc.buckets.bucket import Bucket
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan
from llmc.buckets.provenance import Provenance
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import CompileResult, compile_bundle
from llmc.errors import InputError, UnknownNameError
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors.envelope import Envelope
from llmc.runtime.executors.xla.envelope import FORM
from tests.compiler import tiny

PLAN = Plan(Limits(32, 2, 32, 8), (Bucket("prompt", 1, 32, 32), Bucket("decode", 2, 1, 32)), Provenance("test"))
needs_plugin = pytest.mark.skipif(find_spec("jax_cuda13_plugin") is None, reason="XLA's plug-in is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("model"), "mistral")


def compile_for(device: str, model: Path, path: Path, **options: object) -> CompileResult:
    asked = CompileOptions.of(device, dtype="bf16", **options)
    return compile_bundle(str(model), path / "bundle", PLAN, asked, Store(path / "store"), lambda _: None)


@needs_plugin
def test_steps_hold_the_kernel_as_machine_code_and_the_plain_form_is_verified_on_cpu(
    model: Path, tmp_path: Path
) -> None:
    made = compile_for("cuda:h100-2", model, tmp_path, attention="pallas", verify="all", tensor_parallel=2)

    assert made.verification["leak"] == 0
    assert made.verification["mean_kl"] < 0.02
    bundle = Bundle.open(tmp_path / "bundle")
    for executable in bundle.manifest.executables:
        envelope = Envelope.parse(bundle.files.read(executable.blob), str(executable), FORM)
        native = bytes(envelope.section("native"))
        assert b"attention" in native
        assert b"\x7fELF" in native
        assert str(Path(__file__).parents[4]).encode() not in native
        assert b"triton" not in bytes(envelope.section("export")), "portable programs have the plain form"
        assert envelope.header["memory"]["temporary"] < 200_000
        assert envelope.header["collectives"].keys() <= {"all-reduce", "all-gather"}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"attention": "flash"}, UnknownNameError, "unknown attention 'flash'.*pallas, plain"),
        ({"attention": "pallas", "lowering": "torch-xla"}, InputError, "--attention pallas works with --lowering jax"),
    ],
)
def test_what_cannot_be_is_refused(
    model: Path, tmp_path: Path, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        compile_for("cuda:h100", model, tmp_path, **options)
