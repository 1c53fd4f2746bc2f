"""`llmc cache push|pull`, and a compile that reads through a remote."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from llmc.artifacts.bundle.manifest import read_manifest
from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.bundle.stored import KIND
from llmc.artifacts.store.store import Store
from llmc.cli import output
from llmc.cli.output import TransferProgress
from tests.artifacts.helpers import files_below, flip, key
from tests.artifacts.remotes.helpers import add_manifest
from tests.cli.helpers import Llmc
from tests.tiers import default_cases


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


@pytest.fixture
def far(tmp_path: Path) -> Path:
    return tmp_path / "far"


def native(store: Store) -> str:
    """The key of native code in a store."""
    entry = store.publish(key(state="native"), {"code": store.put_bytes(b"code")})
    return entry.key.digest


def test_a_bundle_is_pushed_and_pulled_as_a_folder(llmc: Llmc, bundle: Path, far: Path, tmp_path: Path) -> None:
    pushed = llmc("cache", "push", far, bundle)
    assert re.fullmatch(
        rf"pushed 1 entry to {far}: \d+ blobs, [\d.]+ KiB moved in \d+\.\d s \([\d.]+ [KM]?i?B/s\); "
        r"0 blobs, 0 B were there\n",
        pushed.out,
    ), pushed
    pulled = llmc(
        "cache", "pull", far, "-o", "copy", "--cache-dir", tmp_path / "other", "--allow-unsigned", "--json"
    ).json
    assert pulled["bundle"] == str(bundle.parent / "copy")
    assert pulled["entries"] == 1 and pulled["refused"] == []
    with BundleFiles.open(bundle.parent / "copy") as files:
        assert files.verify() == []
        assert files.manifest == BundleFiles.open(bundle).manifest


def test_a_bundle_may_be_named_by_a_reference(
    llmc: Llmc, bundle: Path, far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMC_ALLOW_UNSIGNED", "1")
    digest = BundleFiles.open(bundle).manifest.digest
    llmc("cache", "export", tmp_path / "b.tar", bundle)
    assert llmc("cache", "push", far, f"store:{digest[7:19]}", "--json").json["entries"] == 1
    assert llmc("cache", "push", tmp_path / "farther", tmp_path / "b.tar", "--json").json["entries"] == 1


def test_everything_is_pushed_but_what_means_something_here_only(
    llmc: Llmc, bundle: Path, far: Path, store: Store
) -> None:
    here_only = [entry for entry in store.entries() if entry.key.is_local]
    assert here_only
    assert llmc("cache", "push", far, "--json").json["entries"] == len(store.entries()) - len(here_only)
    again = llmc("cache", "push", far, "--json").json
    assert (again["entries"], again["blobs"]) == (0, 0)
    assert {entry.key for entry in Store(far).entries()} == {entry.key for entry in store.entries()} - {
        entry.key for entry in here_only
    }


def test_keys_and_kinds_choose(llmc: Llmc, store: Store, far: Path, tmp_path: Path) -> None:
    one, other = (store.publish(key("executable", n=n), {}) for n in range(2))
    weights = store.publish(key("weights"), {})
    assert llmc("cache", "push", far, one.key.short, "--json").json["entries"] == 1
    assert llmc("cache", "push", far, "--kind", "weights", "--json").json["entries"] == 1
    assert {entry.key for entry in Store(far).entries()} == {one.key, weights.key}
    pulled = llmc("cache", "pull", far, weights.key.short, "--cache-dir", tmp_path / "other", "--json").json
    assert pulled["entries"] == 1
    assert [entry.key for entry in Store(tmp_path / "other").entries()] == [weights.key]
    assert other.key.short in llmc("cache", "pull", far, other.key.short).failed(5)


def test_native_code_is_refused_unless_signed_or_allowed(
    llmc: Llmc, store: Store, far: Path, keys: Path, tmp_path: Path
) -> None:
    digest = native(store)
    location = ("--cache-dir", tmp_path / "other")
    assert llmc("cache", "push", far).code == 0
    refused = llmc("cache", "pull", far, *location)
    assert refused.code == 5
    for hint in ("not signed", "llmc cache sign", "llmc cache trust", "--allow-unsigned", "LLMC_ALLOW_UNSIGNED=1"):
        assert hint in refused.err
    assert Store(tmp_path / "other").entries() == []
    assert llmc("cache", "push", far, "--key", "release", "--json").json["entries"] == 1
    unknown = llmc("cache", "pull", far, *location)
    assert unknown.code == 5 and "not trusted here" in unknown.err
    assert llmc("cache", "trust", "release.pub").code == 0
    assert llmc("cache", "pull", far, *location, "--json").json["entries"] == 1
    assert Store(tmp_path / "other").find(digest).signature is not None
    allowed = llmc("cache", "pull", far, "--cache-dir", tmp_path / "third", "--allow-unsigned", "--json")
    assert allowed.json["entries"] == 1


def test_the_signing_key_of_the_environment_signs(
    llmc: Llmc, bundle: Path, far: Path, keys: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LLMC_SIGNING_KEY", "release")
    assert llmc("cache", "push", far, bundle).code == 0
    assert llmc("cache", "trust", "release.pub").code == 0
    assert llmc("cache", "pull", far, "-o", "copy", "--cache-dir", tmp_path / "other").code == 0
    assert (keys / "copy" / "signature.json").is_file()
    assert not (bundle / "signature.json").exists()


def test_what_is_refused_is_in_the_json_too(llmc: Llmc, store: Store, far: Path) -> None:
    native(store)
    llmc("cache", "push", far)
    ran = llmc("cache", "pull", far, "--json", "--cache-dir", far.parent / "other")
    assert ran.code == 5
    assert '"refused": [\n' in ran.out and "not signed" in ran.out


def test_damage_in_the_remote_is_named_at_the_end(llmc: Llmc, store: Store, far: Path, tmp_path: Path) -> None:
    good, bad = (store.publish(key(n=n), {"x": store.put_bytes(b"%d" % n * 50)}) for n in range(2))
    llmc("cache", "push", far)
    flip(Store(far).layout.blob(bad.outputs["x"].digest))
    ran = llmc("cache", "pull", far, "--cache-dir", tmp_path / "other")
    assert ran.code == 5
    assert f"1 entry not pulled: executable {bad.key.short}: " in ran.err
    assert [entry.key for entry in Store(tmp_path / "other").entries()] == [good.key]


def test_a_bundle_with_o_has_to_be_one(llmc: Llmc, store: Store, far: Path) -> None:
    far.mkdir()
    assert "there is none" in llmc("cache", "pull", far, "-o", "copy").failed(2)
    add_manifest(store)
    add_manifest(store, device="other")
    llmc("cache", "push", far)
    assert "there are 2" in llmc("cache", "pull", far, "-o", "copy").failed(2)
    assert "kind weights" in llmc("cache", "pull", far, "-o", "copy", "--kind", "weights").failed(2)
    one = store.entries(KIND)[0].key.short
    assert llmc("cache", "pull", far, one, "-o", "copy", "--allow-unsigned").code == 0


def test_an_untrusted_bundle_makes_no_folder(llmc: Llmc, bundle: Path, store: Store, far: Path, here: Path) -> None:
    add_manifest(store)
    llmc("cache", "push", far, "--kind", KIND)
    (digest,) = [entry.key.hex for entry in store.entries(KIND) if entry.meta["device"] == "cpu"]
    ran = llmc("cache", "pull", far, digest, "-o", "copy", "--cache-dir", here / "other")
    assert ran.code == 5 and "native code is not signed" in ran.err
    assert not (here / "copy").exists()


def test_a_remote_that_is_gone_is_one_clear_line(llmc: Llmc, far: Path) -> None:
    assert "is it mounted" in llmc("cache", "pull", far / "a" / "b").failed(5)
    assert "is it mounted" in llmc("cache", "push", far / "a" / "b", add(llmc, far)).failed(5)


def add(llmc: Llmc, far: Path) -> str:
    entry = Store(far.parent / "cache").publish(key(), {})
    return entry.key.short


@pytest.mark.parametrize("url", ["nosuch://user:hush@place", "s3://k:hush@[bad"])
def test_a_url_that_is_none_is_a_usage_error_without_its_secrets(llmc: Llmc, url: str) -> None:
    for command in ("push", "pull"):
        assert "hush" not in llmc("cache", command, url).failed(2)


def test_a_damaged_bundle_is_not_pushed(llmc: Llmc, bundle: Path, far: Path, tmp_path: Path) -> None:
    for path in files_below(bundle / "blobs"):
        flip(path)
    message = llmc("cache", "push", far, bundle, "--cache-dir", tmp_path / "other").failed(5)
    assert str(bundle) in message
    assert not far.exists()


def test_local_results_cannot_be_named(llmc: Llmc, store: Store, far: Path) -> None:
    entry = store.publish(key("local-x"), {})
    assert "only valid on this machine" in llmc("cache", "push", far, entry.key.short).failed(2)


# Containers


def test_one_bundle_goes_by_an_image_layout(llmc: Llmc, bundle: Path, store: Store, here: Path) -> None:
    pushed = llmc("cache", "push", "oci-layout:images:v1", bundle, "--json").json
    assert pushed["blobs"] > 0
    flags = ("-o", "copy", "--cache-dir", here / "other", "--allow-unsigned", "--json")
    pulled = llmc("cache", "pull", "oci-layout:images:v1", *flags).json
    assert pulled["bundle"] == str(here / "copy")
    with BundleFiles.open(here / "copy") as files:
        assert files.verify() == []


def test_an_image_is_one_bundle(llmc: Llmc, bundle: Path, store: Store) -> None:
    executable = store.publish(key(), {})
    assert "takes one bundle" in llmc("cache", "push", "oci-layout:images").failed(2)
    assert "takes one bundle" in llmc("cache", "push", "oci-layout:images", bundle, bundle).failed(2)
    assert "not a bundle" in llmc("cache", "push", "oci-layout:images", executable.key.short).failed(2)
    assert "leave out keys" in llmc("cache", "pull", "oci-layout:images", "abcdef").failed(2)


# Read-through


def test_a_compile_takes_what_the_remote_has(
    llmc: Llmc, toy: Path, bundle: Path, far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert llmc("cache", "push", far).code == 0
    monkeypatch.setenv("LLMC_REMOTE_CACHE", str(far))
    monkeypatch.setenv("LLMC_ALLOW_UNSIGNED", "1")
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "fresh"))
    flags = ("--device", "fake", "--max-model-len", 32, "--max-num-seqs", 4)
    built = llmc("compile", toy, *flags, "-o", "again", "--json").json
    assert built["built"] == 0 and built["reused"] > 0
    assert BundleFiles.open("again").manifest.blobs == BundleFiles.open(bundle).manifest.blobs


def test_a_compile_offline_works_from_local(
    llmc: Llmc, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LLMC_REMOTE_CACHE", str(tmp_path / "not" / "mounted"))
    built = llmc(
        "compile", toy, "--device", "fake", "--max-model-len", 32, "--max-num-seqs", 4, "-o", "b", "--json"
    ).json
    assert built["built"] > 0
    warnings = [record.message for record in caplog.records if "continuing without the remote" in record.message]
    assert len(warnings) == 1


def test_a_compile_of_what_the_remote_has_builds_and_verifies_nothing(
    llmc: Llmc, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--device", "fake", "--max-model-len", 32, "--max-num-seqs", 4, "--json")
    built = llmc("compile", toy, *flags, "-o", tmp_path / "b").json
    llmc("cache", "push", tmp_path / "far")
    monkeypatch.setenv("LLMC_REMOTE_CACHE", str(tmp_path / "far"))
    monkeypatch.setenv("LLMC_ALLOW_UNSIGNED", "1")
    monkeypatch.setattr("llmc.compiler.pipeline.verification._draft", lambda *arguments: pytest.fail("verified again"))
    again = llmc("compile", toy, *flags, "-o", tmp_path / "c", "--cache-dir", tmp_path / "empty").json
    assert (again["built"], again["reused"]) == (0, built["built"])
    mine, theirs = (read_manifest(tmp_path / name).to_dict() for name in ("c", "b"))
    taken = mine["verification"].pop("elsewhere")
    assert taken["unsigned"] == taken["outcomes"] > 0
    assert mine == theirs, "all else is the same"


# Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_shown_on_a_terminal_after_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr("llmc.cli.output.time.monotonic", lambda: now[0])
    with TransferProgress("pull") as progress:
        progress(1, 100 << 20)
        assert screen.getvalue() == ""
        now[0] = 2.1
        progress(50 << 20, 100 << 20)
        assert progress._bar is not None
        (task,) = progress._bar.tasks
        assert (task.description, task.completed, task.total) == ("pull", 50 << 20, 100 << 20)


@pytest.mark.parametrize("quiet", [True, False])
def test_no_bar_elsewhere(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quiet: bool) -> None:
    if quiet:
        monkeypatch.setattr("sys.stderr", Terminal())
        monkeypatch.setattr(output, "quiet", True)
    progress = TransferProgress("pull")
    progress._began -= 10
    with progress:
        progress(1, 2)
    assert progress._bar is None
    assert capsys.readouterr().err == ""


@default_cases(2)
@pytest.mark.parametrize("command", ["push {} bundle", "push {}", "pull {}", "pull {} -o out"])
def test_a_place_without_slashes_is_a_usage_error_at_once(llmc: Llmc, bundle: Path, here: Path, command: str) -> None:
    before = sorted(here.iterdir())
    said = llmc(
        "cache", *command.format("oci:images").split(), "--allow-unsigned" if "pull" in command else "-q"
    ).failed(2)
    assert "oci:… is not a remote" in said and "oci-layout:FOLDER" in said
    assert sorted(here.iterdir()) == before
