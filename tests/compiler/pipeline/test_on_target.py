"""Finishing a portable bundle where its device is: what is made, kept, refused, and put back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.bundle.manifest import BUILT_FOR, PORTABLE_NAME
from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.bundle.trust import code_of_bundle
from llmc.artifacts.bundle.writer import write_bundle
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import ExecutableReport
from llmc.compiler.pipeline.on_target import OnTargetResult, compile_fully, compile_on_target, unfinished
from llmc.compiler.pipeline.resolve import CompileJob
from llmc.compiler.targets.fake_on_target import FakeOnTargetCompiler
from llmc.errors import ArtifactError, CompileError, DeviceError, InputError, VerificationError
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.fake import device
from llmc.runtime.executors.fake.device import FakeGpu
from llmc.settings import Settings
from tests.tiers import default_cases
from tests.toy import Toy


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    """A toy with a portable bundle."""
    built = Toy.make(tmp_path)
    built.compile(device="fake:portable")
    return built


@pytest.fixture
def put_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a card into this host, or takes it out."""

    def put(name: str | None = "fake-1", **built: str) -> None:
        monkeypatch.setattr(device, "here", None if name is None else FakeGpu(name, **built))

    return put


def finish(toy: Toy, **given: Any) -> OnTargetResult:
    toy.events.clear()
    return compile_on_target(toy.bundle, toy.store, toy.events.append, **given)


def states(toy: Toy) -> set[str]:
    return {item.state for item in Bundle.open(toy.bundle).manifest.executables}


def test_what_was_portable_is_native_where_the_device_is(toy: Toy, put_in: Any) -> None:
    before = Bundle.open(toy.bundle).manifest
    put_in()
    result = finish(toy)
    after = Bundle.open(toy.bundle).manifest
    count = len(before.executables)
    assert (result.built, result.reused, result.native, result.portable) == (count, 0, count, 0)
    assert states(toy) == {"native"}
    assert after.options[BUILT_FOR] == result.built_for == {"gpu": "fake-1", "driver": "1.0"}
    assert after.options["remaining"] == ""
    assert after.provenance["on_target"]["manifest"] == before.digest
    assert [e.index for e in toy.executables] == list(range(1, count + 1))
    assert code_of_bundle(before) is None and code_of_bundle(after) is not None


def test_the_portable_half_stays_and_opens_anywhere(toy: Toy, put_in: Any) -> None:
    before = Bundle.open(toy.bundle).manifest
    put_in()
    finish(toy)
    put_in(None)
    half = Bundle.open(toy.bundle, Settings(open_portable=True))
    assert half.manifest == before
    executor = open_executor(half)
    executor.open_all()
    executor.close()
    assert not half.files.verify()


def test_nothing_is_built_twice_and_the_bundle_stays_the_same(toy: Toy, put_in: Any) -> None:
    put_in()
    first = finish(toy)
    digest = Bundle.open(toy.bundle).manifest.digest
    again = finish(toy, jobs=4)
    assert (again.built, again.reused) == (0, first.built)
    assert Bundle.open(toy.bundle).manifest.digest == digest


def test_a_compile_on_the_devices_host_finishes(toy: Toy, put_in: Any) -> None:
    put_in()
    options = CompileOptions.of("fake:portable", require_native=True)
    result = compile_fully(CompileJob.of(toy.model, toy.plan, options), toy.bundle, toy.store, toy.events.append)
    assert (result.portable, result.remaining) == (0, "")
    assert result.native == result.on_target["native"] == len(Bundle.open(toy.bundle).manifest.executables)
    assert Bundle.open(toy.bundle).manifest.verification["on_target"]["reference"] == "its portable executables"


def test_a_compile_elsewhere_does_not(toy: Toy) -> None:
    options = CompileOptions.of("fake:portable")
    result = compile_fully(CompileJob.of(toy.model, toy.plan, options), toy.bundle, toy.store, toy.events.append)
    assert result.native == 0 and not result.on_target
    with pytest.raises(DeviceError, match="no fake device"):
        finish(toy)
    with pytest.raises(DeviceError, match=r"--require-native.*no fake device"):
        toy.compile(device="fake:portable", require_native=True)


def test_a_native_bundle_has_nothing_to_finish(toy: Toy, put_in: Any) -> None:
    put_in()
    toy.compile(device="fake")
    with pytest.raises(InputError, match="nothing to compile on the target"):
        finish(toy)


def test_a_bundle_without_weights_is_refused_and_its_compile_is_no_error(
    toy: Toy, put_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in()
    before = Bundle.open(toy.bundle).manifest
    monkeypatch.setattr("llmc.artifacts.bundle.manifest.Manifest.is_unbound", True)
    with pytest.raises(InputError, match="compiled from a configuration alone"):
        finish(toy)
    assert not unfinished(Bundle.open(toy.bundle)) and Bundle.open(toy.bundle).manifest == before
    options = CompileOptions.of("fake:portable")
    result = compile_fully(CompileJob.of(toy.model, toy.plan, options), toy.bundle, toy.store, toy.events.append)
    assert result.portable and not result.on_target


@pytest.mark.parametrize(("changes", "said"), [
    ({"name": "fake-2"}, "another gpu fake-1 (here: fake-2)"), ({"driver": "2.0"}, "another driver 1.0 (here: 2.0)"),
])  # fmt: skip
def test_another_host_is_refused_by_what_differs_and_finishes_it_again(
    toy: Toy, put_in: Any, changes: dict[str, str], said: str
) -> None:
    put_in()
    finish(toy)
    put_in(**changes)
    with pytest.raises(ArtifactError) as refused:
        open_executor(Bundle.open(toy.bundle))
    assert said in str(refused.value)
    assert f"llmc compile --resume -o {toy.bundle}" in str(refused.value)
    assert "LLMC_OPEN_PORTABLE=1" in str(refused.value)
    result = finish(toy)
    assert result.built == result.native > 0
    open_executor(Bundle.open(toy.bundle)).close()


def test_a_host_without_the_device_is_reported_the_way_out(toy: Toy, put_in: Any) -> None:
    put_in()
    finish(toy)
    put_in(None)
    with pytest.raises(DeviceError, match=r"compiled for driver 1.0, gpu fake-1.*LLMC_OPEN_PORTABLE=1"):
        open_executor(Bundle.open(toy.bundle))


def test_an_interrupt_keeps_what_is_done(toy: Toy, put_in: Any) -> None:
    put_in()
    before = Bundle.open(toy.bundle).manifest

    def third(event: Any) -> None:
        if isinstance(event, ExecutableReport) and event.index == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_on_target(toy.bundle, toy.store, third)
    assert Bundle.open(toy.bundle).manifest == before
    assert finish(toy).reused >= 3


def test_the_compilers_error_leaves_the_bundle_as_it_was(
    toy: Toy, put_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in()
    before = Bundle.open(toy.bundle).manifest

    def broken(self: FakeOnTargetCompiler, bundle: Bundle, executable: Any) -> bytes:
        raise CompileError(f"{executable}: no room on the card")

    monkeypatch.setattr(FakeOnTargetCompiler, "compile", broken)
    with pytest.raises(CompileError, match="no room on the card"):
        finish(toy)
    assert Bundle.open(toy.bundle).manifest == before


def test_executables_that_disagree_are_not_published(toy: Toy, put_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in()
    before = Bundle.open(toy.bundle).manifest
    sound = FakeOnTargetCompiler.compile

    def wrong(self: FakeOnTargetCompiler, bundle: Bundle, executable: Any) -> bytes:
        fields = json.loads(sound(self, bundle, executable))
        largest = executable.batch == 4 and executable.phase == "decode"
        return json.dumps({**fields, "decay": -0.8} if largest else fields).encode()

    monkeypatch.setattr(FakeOnTargetCompiler, "compile", wrong)
    with pytest.raises(VerificationError, match=r"portable executables.*decode\[4x1\+16\].*also in decode\[4x1\+32\]"):
        finish(toy)
    assert Bundle.open(toy.bundle).manifest == before
    assert finish(toy, verify="none").verification == {"mode": "none"}


def test_a_signature_of_the_portable_bundle_is_not_kept(toy: Toy, put_in: Any) -> None:
    put_in()
    (toy.bundle / "signature.json").write_text("{}")
    assert finish(toy).unsigned
    assert BundleFiles.open(toy.bundle).signature is None
    assert not finish(toy).unsigned


def test_a_bundle_without_a_tokenizer_is_verified_with_any_tokens(tmp_path: Path, put_in: Any) -> None:
    toy = Toy.make(tmp_path, tokenizer=False)
    toy.compile(device="fake:portable")
    put_in()
    assert finish(toy).verification["rows"] > 0


class TestHostile:
    """A bundle that says of itself what is not so."""

    def edit(self, toy: Toy, **changes: Any) -> None:
        files = BundleFiles.open(toy.bundle)
        manifest = files.manifest.changed(**changes)
        write_bundle(toy.bundle, manifest, {digest: toy.store.path(digest) for digest in manifest.blobs})

    def test_finished_code_in_a_bundle_that_counts_as_data_is_not_loaded(self, toy: Toy, put_in: Any) -> None:
        put_in()
        finish(toy)
        manifest = Bundle.open(toy.bundle).manifest
        files = {name: digest for name, digest in manifest.files.items() if name != PORTABLE_NAME}
        portable = [{**item._asdict(), "state": "portable"} for item in manifest.executables]
        self.edit(toy, executables=portable, files=files)
        executor = open_executor(Bundle.open(toy.bundle))
        with pytest.raises(ArtifactError, match="is native code in a bundle that counts as portable"):
            executor.open_all()

    def test_a_portable_half_that_is_code_is_not_opened(self, toy: Toy, put_in: Any) -> None:
        put_in()
        finish(toy)
        manifest = Bundle.open(toy.bundle).manifest
        inner = toy.store.put_bytes(manifest.to_bytes())
        blobs = {**manifest.blobs, inner.digest: inner.size}
        self.edit(toy, files={**manifest.files, PORTABLE_NAME: inner.digest}, blobs=blobs)
        with pytest.raises(ArtifactError, match="is not portable: it has executable"):
            Bundle.open(toy.bundle, Settings(open_portable=True))
        with pytest.raises(ArtifactError, match="is not portable"):
            finish(toy)

    @default_cases(2)
    @pytest.mark.parametrize("said", [{}, [], "fake-1", {"gpu": 1}])
    def test_a_bundle_that_does_not_say_what_it_is_for_is_refused(self, toy: Toy, put_in: Any, said: Any) -> None:
        put_in()
        finish(toy)
        self.edit(toy, options={**Bundle.open(toy.bundle).manifest.options, BUILT_FOR: said})
        with pytest.raises(ArtifactError, match="does not say what"):
            open_executor(Bundle.open(toy.bundle))
        assert finish(toy).native > 0
