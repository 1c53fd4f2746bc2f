"""Native code from elsewhere that nobody trusted signed, and from places that others can write: it never runs.

The code is a library that writes a file when it is loaded. Where unsigned code is allowed it does, so that the refusals
here are of something that would run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.bundle.kernel_sets import best_set
from llmc.artifacts.bundle.manifest import Manifest
from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.bundle.stored import checkout, publish_bundle
from llmc.artifacts.oci import push_image
from llmc.artifacts.oci.archive import export_images
from llmc.artifacts.remotes.folder import FolderRemote
from llmc.artifacts.remotes.transfer import push
from llmc.artifacts.store.entries import Entry
from llmc.artifacts.store.store import Store
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.runtime.host import cpu_features
from tests.artifacts.helpers import files_below, key
from tests.cli.helpers import Llmc
from tests.compiler import tiny
from tests.tiers import default_cases

SOURCE = """
void *fopen(const char *path, const char *mode);
int fclose(void *file);
char *getenv(const char *name);
__attribute__((constructor)) static void ran(void) {
    void *file = fopen(getenv("LLMC_TEST_MARKER"), "w");
    if (file) fclose(file);
}
void *RegisterCustomOps(void *options, const void *base) { return 0; }
"""
PROMPT = ("--prompt", "a", "--max-tokens", 1)
KERNELS = best_set(cpu_features())
assert KERNELS is not None, "llmc has kernels for the CPUs that its tests run on"
KERNELS_FILE = KERNELS.file
Disguise = Callable[[Store, BundleFiles, bytes], Entry]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("library")
    (folder / "marker.c").write_text(SOURCE)
    # it takes the C library from the process: with one of its own, the compiler builds glibc's stubs first
    freestanding = ("-shared", "-fPIC", "-ffreestanding", "-nostdlib")
    command = [sys.executable, "-m", "ziglang", "cc", *freestanding, "marker.c", "-o", "marker.so"]
    locations = {"ZIG_LOCAL_CACHE_DIR": os.environ["ZIG_GLOBAL_CACHE_DIR"]}
    subprocess.run(command, cwd=folder, env={**os.environ, **locations}, check=True, capture_output=True)
    return (folder / "marker.so").read_bytes()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> BundleFiles:
    """A small bundle for ONNX Runtime, without kernels of llmc's own."""
    folder = tmp_path_factory.mktemp("sound")
    model = tiny.write_model(folder / "model", "qwen2")
    options = CompileOptions(device="onnxruntime", quantize="none", verify="none")
    compile_bundle(str(model), folder / "bundle", tiny.tiny_plan(), options, Store(folder / "store"), lambda _: None)
    return BundleFiles.open(folder / "bundle")


@pytest.fixture
def marker(tmp_path: Path, llmc: Llmc, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the library writes, on a host that trusts no key."""
    monkeypatch.setenv("LLMC_TEST_MARKER", str(tmp_path / "ran"))
    monkeypatch.setenv("LLMC_TRUSTED_KEYS", str(tmp_path / "no keys"))
    return tmp_path / "ran"


def publish(store: Store, sound: BundleFiles, blobs: Mapping[str, bytes], **changes: Any) -> Entry:
    """The sound bundle with other members, and with files more, in a store of the attacker's."""
    members = sound.manifest.to_dict()
    for digest in sound.manifest.blobs:
        store.put_file(sound.path(digest))
    added = {name: store.put_bytes(data) for name, data in blobs.items()}
    members["files"] |= {name: blob.digest for name, blob in added.items()}
    members["blobs"] |= {blob.digest: blob.size for blob in added.values()}
    members["executables"] = [{**item, "state": "portable"} for item in members["executables"]]
    return publish_bundle(store, Manifest(members | changes))


def beside_a_portable_executable(store: Store, sound: BundleFiles, code: bytes) -> Entry:
    return publish(store, sound, {KERNELS_FILE: code})


def in_the_starter_alone(store: Store, sound: BundleFiles, code: bytes) -> Entry:
    """The outer manifest names the library by its digest only, and as a file that nothing opens."""
    inner = read(store, publish(store, sound, {KERNELS_FILE: code}))
    from importlib.metadata import version

    toolchain = {**sound.manifest.toolchain, "openvino": version("openvino").split("-")[0]}
    options = {**sound.manifest.options, "kv_cache_dtype": "u8", "properties": {}, "fixed_properties": []}
    blobs = {"starter.json": inner.to_bytes(), "notes.txt": code}
    return publish(store, sound, blobs, executor="openvino", toolchain=toolchain, options=options)


def for_an_executor_that_says_portable(store: Store, sound: BundleFiles, code: bytes) -> Entry:
    """XLA's loader goes by the file, not by the state."""
    return publish(store, sound, {}, executor="xla")


def for_an_unknown_executor(store: Store, sound: BundleFiles, code: bytes) -> Entry:
    return publish(store, sound, {}, executor="nobody-knows")


def as_weights(store: Store, sound: BundleFiles, code: bytes) -> Entry:
    return publish(store, sound, {"more.weights": code})


def said_to_be_native(store: Store, sound: BundleFiles, code: bytes) -> Entry:
    return publish(store, sound, {}, executables=sound.manifest.to_dict()["executables"])


DISGUISES = (
    beside_a_portable_executable, in_the_starter_alone, for_an_executor_that_says_portable, for_an_unknown_executor,
    as_weights, said_to_be_native,
)  # fmt: skip


def read(store: Store, entry: Entry) -> Manifest:
    return Manifest.from_bytes(store.get_bytes(entry.outputs["manifest.json"].digest))


def by_folder(store: Store, entry: Entry, far: Path) -> list[object]:
    push(store, [entry], FolderRemote(str(far)))
    return ["cache", "pull", far, "-o", "pulled"]


def by_layout(store: Store, entry: Entry, far: Path) -> list[object]:
    push_image(store, entry, f"oci-layout:{far}:latest")
    return ["generate", f"oci-layout:{far}:latest", *PROMPT]


def by_archive(store: Store, entry: Entry, far: Path) -> list[object]:
    export_images(store, [entry], far.with_suffix(".tar"))
    return ["generate", far.with_suffix(".tar"), *PROMPT]


WAYS = (by_folder, by_layout, by_archive)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("disguise", DISGUISES)
def test_it_is_refused(
    llmc: Llmc, marker: Path, tmp_path: Path, sound: BundleFiles, library: bytes, disguise: Disguise, way: Any
) -> None:
    theirs = Store(tmp_path / "theirs")
    entry = disguise(theirs, sound, library)
    done = llmc(*way(theirs, entry, tmp_path / "far"))
    assert done.code == 5, done
    assert "native code" in done.err and "is not signed" in done.err and "--allow-unsigned" in done.err
    assert not marker.exists()
    mine = Store(tmp_path / "cache")
    assert mine.entries() == []
    announced = disguise is not as_weights  # by the manifest; then nothing of it moves, but what is read in one go
    if announced and way in (by_folder, by_layout):
        assert not any(mine.locate(blob) for blob in entry.outputs.values() if blob.size > 10_000)


@pytest.mark.parametrize("way", [by_folder, by_layout, by_archive])
@pytest.mark.parametrize("disguise", [beside_a_portable_executable, in_the_starter_alone])
def test_it_would_run_where_unsigned_code_is_allowed(
    llmc: Llmc, marker: Path, tmp_path: Path, sound: BundleFiles, library: bytes, disguise: Disguise, way: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("LLMC_ALLOW_UNSIGNED", "1")
    theirs = Store(tmp_path / "theirs")
    command = way(theirs, disguise(theirs, sound, library), tmp_path / "far")
    done = llmc(*command)
    if way is by_folder:
        assert done.code == 0, done
        done = llmc("generate", "pulled", *PROMPT)
    assert done.code == 0 and marker.exists(), done


def test_a_loader_refuses_code_in_a_bundle_that_counts_as_data(
    llmc: Llmc, marker: Path, tmp_path: Path, sound: BundleFiles, library: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmc.artifacts.bundle import reader as bundle
    from llmc.artifacts.bundle import trust

    theirs = Store(tmp_path / "theirs")
    command = by_archive(theirs, beside_a_portable_executable(theirs, sound, library), tmp_path / "far")
    monkeypatch.setenv("LLMC_ALLOW_UNSIGNED", "1")
    monkeypatch.setattr(bundle, "code_of_bundle", lambda _: None)
    assert f"{KERNELS_FILE} is native code in a bundle that counts as portable" in llmc(*command).failed(5)
    assert not marker.exists()
    assert trust.code_of_bundle(sound.manifest) is not None


@pytest.mark.parametrize("kind", ["slots", "kernels", "finish", "starter", "a-new-stage"])
def test_results_of_stages_that_make_code_are_not_taken_by_pull_or_read_through(
    llmc: Llmc, marker: Path, tmp_path: Path, kind: str
) -> None:
    from llmc.artifacts.remotes.read_through import RemoteUpstream
    from llmc.artifacts.signing.keyring import Keyring

    theirs, far = Store(tmp_path / "theirs"), tmp_path / "far"
    entry = theirs.publish(key(kind, target="xla"), {"slot_copy": theirs.put_bytes(b"code" * 100)})
    remote = FolderRemote(str(far))
    push(theirs, [entry], remote)
    assert "is not signed" in llmc("cache", "pull", far).err
    keyring = Keyring(tmp_path / "no keys")
    mine = Store(tmp_path / "cache", upstream=RemoteUpstream(lambda: remote, lambda: keyring))
    assert mine.obtain(entry.key) is None
    assert not any(path.stat().st_size == 400 for path in files_below(tmp_path / "cache" / "v1" / "blobs"))


@pytest.mark.parametrize("way", ["pull", "read-through"])
def test_what_is_said_to_be_weights_and_is_a_library_is_not_taken(
    llmc: Llmc, marker: Path, tmp_path: Path, library: bytes, way: str
) -> None:
    from llmc.artifacts.remotes.read_through import RemoteUpstream
    from llmc.artifacts.signing.keyring import Keyring

    theirs, far = Store(tmp_path / "theirs"), tmp_path / "far"
    entry = theirs.publish(key("weights"), {"weights": theirs.put_bytes(library)})
    remote = FolderRemote(str(far))
    push(theirs, [entry], remote)
    if way == "pull":
        assert "holds a shared library (ELF)" in llmc("cache", "pull", far).err
    else:
        keyring = Keyring(tmp_path / "no keys")
        mine = Store(tmp_path / "cache", upstream=RemoteUpstream(lambda: remote, lambda: keyring))
        assert mine.obtain(entry.key) is None
    assert Store(tmp_path / "cache").lookup(entry.key) is None


def test_import_takes_it_where_the_command_says_so(
    llmc: Llmc, marker: Path, tmp_path: Path, sound: BundleFiles, library: bytes
) -> None:
    theirs = Store(tmp_path / "theirs")
    by_archive(theirs, beside_a_portable_executable(theirs, sound, library), tmp_path / "far")
    assert llmc("cache", "import", tmp_path / "far.tar", "--allow-unsigned", "--json").json["entries"] == 1
    assert len(Store(tmp_path / "cache").entries("bundle")) == 1


# Places that others can write


@pytest.fixture
def swapped(tmp_path: Path, sound: BundleFiles, library: bytes) -> Path:
    """A bundle folder where another user put a library, and the manifest that has its digest."""
    theirs = Store(tmp_path / "theirs")
    folder = checkout(theirs, beside_a_portable_executable(theirs, sound, library), tmp_path / "models" / "bundle")
    shutil.rmtree(theirs.root)
    return folder


@default_cases(2)
@pytest.mark.parametrize("which", ["models", "models/bundle", "models/bundle/blobs", "models/bundle/manifest.json"])
def test_a_library_in_a_place_that_all_can_write_is_not_loaded(
    llmc: Llmc, marker: Path, tmp_path: Path, swapped: Path, which: str, caplog: pytest.LogCaptureFixture
) -> None:
    location = tmp_path / which
    location.chmod(0o777)
    message = f"is native code that others may change, so it is not loaded: {location} can be written by every user"
    for command in (("generate", swapped, *PROMPT), ("serve", swapped, "--port", 0), ("warmup", swapped)):
        done = llmc(*command)
        assert (done.code, message in done.err) == (5, True), done
    assert not marker.exists()
    assert llmc("cache", "show", swapped).code == 0, "nothing of it is loaded"
    assert not any("others may change this bundle" in message for message in caplog.messages), "errors say it"


def test_it_would_be_loaded_where_only_this_user_can_write_or_all_are_trusted(
    llmc: Llmc, marker: Path, tmp_path: Path, swapped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert llmc("generate", swapped, *PROMPT).code == 0
    assert marker.exists()
    marker.unlink()
    swapped.parent.chmod(0o777)
    monkeypatch.setenv("LLMC_TRUSTED_FOLDERS", os.pathsep.join(["/nowhere", str(swapped.parent)]))
    assert llmc("generate", swapped, *PROMPT).code == 0
    assert marker.exists()


@pytest.mark.full
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("which", ["models", "models/bundle/manifest.json"])
def test_a_library_in_a_place_of_another_user_is_not_loaded(
    llmc: Llmc, marker: Path, tmp_path: Path, swapped: Path, which: str
) -> None:
    swapped.parent.chmod(0o1777)
    os.chown(tmp_path / which, 54321, 54321)
    said = llmc("generate", swapped, *PROMPT).failed(5)
    assert f"{tmp_path / which} belongs to user 54321; make it the user's" in said
    assert not marker.exists()


@pytest.mark.parametrize("state", ["portable", "native"])
def test_data_in_a_place_that_all_can_write_is_used_with_a_warning(
    llmc: Llmc, tmp_path: Path, sound: BundleFiles, caplog: pytest.LogCaptureFixture, state: str
) -> None:
    """Executables of ONNX Runtime are data, and count as native where the manifest says so."""
    theirs = Store(tmp_path / "theirs")
    executables = [{**item, "state": state} for item in sound.manifest.to_dict()["executables"]]
    folder = checkout(theirs, publish(theirs, sound, {}, executables=executables), tmp_path / "bundle")
    folder.chmod(0o777)
    assert llmc("generate", folder, *PROMPT).code == 0
    (message,) = caplog.messages
    assert message.startswith(f"{folder}: others may change this bundle: {folder} can be written by every user")


def test_a_compile_takes_no_native_code_from_a_store_that_all_can_write(
    llmc: Llmc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.write_model(tmp_path / "model", "qwen2")
    (tmp_path / "cache" / "v1").mkdir(parents=True)
    (tmp_path / "cache" / "v1").chmod(0o777)
    command = ("compile", model, "--device", "onnxruntime", "--max-model-len", 48, "--verify", "none", "-o", "bundle")
    assert "no native code is used from this store, since others may change it" in llmc(*command).failed(5)
    assert not (tmp_path / "bundle").exists()
    monkeypatch.setenv("LLMC_TRUSTED_FOLDERS", str(tmp_path))
    assert llmc(*command).code == 0
