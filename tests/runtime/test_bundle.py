"""Opening a bundle: cheap, lazily verified, and clear about everything that can be wrong with it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llmc.artifacts.bundle.manifest import read_manifest
from llmc.artifacts.bundle.reader import blob_path
from llmc.errors import ArtifactError, InputError, UnknownNameError
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.executors import executor_class, open_executor
from llmc.runtime.executors.fake import executor as fake_executor
from llmc.runtime.executors.fake.executor import FakeExecutor
from llmc.runtime.llm import BundleLLM
from llmc.testing.toy import EOS, TEMPLATE
from tests.artifacts.helpers import flip, overwrite, truncate
from tests.devices import use
from tests.manifests import edit_manifest
from tests.toy import Toy, greedy

GREEDY = SamplingParams(max_tokens=4, temperature=0)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    toy = Toy.make(tmp_path_factory.mktemp("toy"))
    toy.compile(verify="all")
    return toy


@pytest.fixture
def copy(toy: Toy, tmp_path: Path) -> Path:
    """A copy of the bundle, to be damaged."""
    return shutil.copytree(toy.bundle, tmp_path / "copy")


# What a bundle says


def test_a_bundle_says_what_it_is(toy: Toy) -> None:
    bundle = Bundle.open(str(toy.bundle))
    assert bundle.path == toy.bundle
    assert bundle.plan == toy.plan
    assert bundle.eos_token_ids == (EOS,)
    assert bundle.special_tokens == {"eos_token": "<|end|>"}
    assert bundle.chat_template == TEMPLATE
    assert bundle.tokenizer.decode(bundle.tokenizer.encode("any text, 日本語")) == "any text, 日本語"
    assert bundle.tokenizer.eos_token_ids == (EOS,)
    assert bundle.recompile_hint == f"llmc compile {toy.model.name} --device fake -o {toy.bundle}"


def test_a_notebook_shows_what_a_bundle_is_built_of_and_its_graphs(toy: Toy, copy: Path) -> None:
    text = Bundle.open(toy.bundle)._repr_html_()
    number = len(read_manifest(toy.bundle).executables)
    for said in (str(toy.bundle), "<td>fake</td>", f"<td>{number} ", "mean_kl", "batch \\ context"):
        assert said in text, said
    edit_manifest(copy, lambda found: found["model"].update(name="<script>"))
    assert "<td>&lt;script&gt;</td>" in Bundle.open(copy)._repr_html_()
    edit_manifest(copy, lambda found: found["options"].update(task="embed"))
    assert "batch" not in Bundle.open(copy)._repr_html_(), "what generates nothing has other graphs"


def test_opening_reads_the_manifest_alone(copy: Path) -> None:
    shutil.rmtree(copy / "blobs")
    assert Bundle.open(copy).plan.limits.max_model_len == 32


def test_a_bundle_moves_and_is_copied_freely(toy: Toy, tmp_path: Path) -> None:
    moved = shutil.copytree(toy.bundle, tmp_path / "far" / "away")
    with BundleLLM(moved) as llm:
        built = llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids
    assert [built] == greedy(toy.model, [[1, 2, 3]], 4)


def test_executors_take_their_sizes_from_the_plan(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, int, int]] = []

    class Given(FakeExecutor):
        def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int) -> None:
            super().__init__(bundle, slots, capacity, threads)
            given.append((slots, capacity, threads))

    use(monkeypatch, executor=Given)
    bundle = Bundle.open(toy.bundle)
    executor = open_executor(bundle)
    assert (executor.slots, executor.capacity) == (4, 33)
    assert open_executor(bundle, slots=2, threads=3).slots == 2
    assert given == [(4, 33, bundle.settings.threads), (2, 33, 3)]
    assert not executor.capabilities.exact


def test_executors_by_name() -> None:
    assert executor_class("fake") is FakeExecutor
    with pytest.raises(UnknownNameError, match=r"unknown executor 'tpu'; known: hpu, .*onnxruntime, .*torch"):
        executor_class("tpu")


# Damage: every blob, in every way, found before it is used and named


def remove(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    overwrite(path, b"")


DAMAGE = {remove: "is missing", truncate: r"has \d+ bytes, expected \d+", flip: "was altered", empty: "has 0 bytes"}


def blob_of(bundle: Path, what: str) -> tuple[str, str]:
    """Digest and description of the blob that is a file or the executable of a shape."""
    manifest = read_manifest(bundle)
    if what in manifest.files:
        return manifest.files[what], what
    (found,) = [e for e in manifest.executables if str(e) == what]
    return found.blob, f"executable {what}"


def use_everything(bundle: Path) -> None:
    with BundleLLM(bundle) as llm:
        llm.generate(["one", "two words", "three", "x" * 30], SamplingParams(max_tokens=6, temperature=0))
        llm.chat([{"role": "user", "content": "hi"}], GREEDY)


WHAT = ["weights", "tokenizer.json", "chat_template.jinja", "prompt batch=1 query=4 context=0"]
WHAT += ["decode batch=4 query=1 context=32"]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("what", WHAT)
def test_a_damaged_blob_is_named_with_its_use_and_a_remedy(
    copy: Path, what: str, damage: Callable[[Path], None]
) -> None:
    use_everything(copy)
    digest, use = blob_of(copy, what)
    damage(blob_path(copy, digest))
    message = rf"{re.escape(f'blob {digest} ({use})')} {DAMAGE[damage]}.*; compile .* `llmc compile .* -o {copy}`"
    with pytest.raises(ArtifactError, match=message) as caught:
        use_everything(copy)
    assert caught.value.exit_code == 5


def test_damage_that_is_not_needed_does_not_hurt(copy: Path) -> None:
    flip(blob_path(copy, blob_of(copy, "prompt batch=1 query=8 context=24")[0]))
    with BundleLLM(copy) as llm:
        assert llm.generate([[1, 2]], GREEDY)[0].outputs[0].finish_reason == "length"


def test_a_damaged_bundle_is_healed_by_compiling_again(toy: Toy, copy: Path) -> None:
    for path in list((copy / "blobs").rglob("*")):
        if path.is_file():
            flip(path)
    assert toy.compile(bundle=copy, verify="all").built == 0
    use_everything(copy)


# Manifests that do not fit


def test_what_is_no_bundle(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "nowhere", "not a bundle .no such file or folder."),
        (tmp_path, r"no manifest\.json in it.*make one with `llmc compile`"),
    ):
        with pytest.raises(ArtifactError, match=message) as caught:
            BundleLLM(path)
        assert caught.value.exit_code == 5


def test_a_schema_from_the_future(copy: Path) -> None:
    edit_manifest(copy, lambda m: m.update(schema=2))
    with pytest.raises(ArtifactError, match=r"bundle schema 2 is newer than schema 1.*upgrade llmc"):
        Bundle.open(copy)


def test_a_plan_from_the_future_or_with_holes(copy: Path) -> None:
    edit_manifest(copy, lambda m: m["plan"].update(schema=9))
    with pytest.raises(
        ArtifactError, match=r"field 'schema' is 9.*compile again: llmc compile .* --device fake"
    ) as caught:
        BundleLLM(copy)
    assert caught.value.exit_code == 5
    edit_manifest(copy, lambda m: m["plan"].update(schema=1, decode=[[1, 1, 8]]))
    with pytest.raises(ArtifactError, match=r"no bucket for .*compile again"):
        BundleLLM(copy)


@pytest.mark.parametrize("version", ["0.9", "1.1", None])
def test_another_toolchain_version(copy: Path, version: str | None) -> None:
    edit_manifest(copy, lambda m: m.update(toolchain={"fake": version} if version else {}))
    message = rf"compiled with the fake device {version}, this host has 1\.0; compile again: llmc compile"
    with pytest.raises(ArtifactError, match=message) as caught:
        BundleLLM(copy)
    assert caught.value.exit_code == 5


def test_an_upgraded_host_refuses_what_was_compiled_before(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_executor, "FAKE_VERSION", "2.0")
    with pytest.raises(ArtifactError, match=r"compiled with the fake device 1\.0, this host has 2\.0"):
        BundleLLM(toy.bundle)


def test_an_executor_of_the_future(copy: Path) -> None:
    edit_manifest(copy, lambda m: m.update(executor="quantum"))
    with pytest.raises(ArtifactError, match="unknown executor 'quantum'"):
        BundleLLM(copy)


def test_a_missing_executable_is_named_when_its_bucket_is_needed(copy: Path) -> None:
    edit_manifest(copy, lambda m: m.update(executables=[e for e in m["executables"] if e["query"] != 16]))
    with BundleLLM(copy) as llm:
        llm.generate([[1, 2]], GREEDY)
        missing = (
            f"no executable for prompt batch 1, query 16, context 0; compile it into the bundle: llmc compile .* {copy}"
        )
        with pytest.raises(ArtifactError, match=missing):
            llm.generate([list(range(14))], GREEDY)
        assert llm.compilations == 0, "a miss is refused, not compiled"
        llm.generate([[1, 2]], GREEDY)


def test_a_missing_executable_of_the_warm_up_fails_at_once(copy: Path) -> None:
    edit_manifest(copy, lambda m: m.update(executables=[e for e in m["executables"] if e["query"] != 4]))
    with pytest.raises(ArtifactError, match="no executable for prompt batch 1, query 4, context 0"):
        BundleLLM(copy)


def test_a_bundle_without_tokenizer_or_template(copy: Path) -> None:
    edit_manifest(copy, lambda m: m["files"].pop("chat_template.jinja"))
    with BundleLLM(copy) as llm:
        assert llm.bundle.chat_template is None
    edit_manifest(copy, lambda m: m["files"].pop("tokenizer.json"))
    with BundleLLM(copy) as llm:
        (output,) = llm.generate([[1, 2]], GREEDY)
        assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == ("", 4)
        with pytest.raises(ArtifactError, match="no tokenizer in the bundle; pass token ids instead of text"):
            llm.generate("text")
        with pytest.raises(InputError):
            llm.generate([[]], GREEDY)
