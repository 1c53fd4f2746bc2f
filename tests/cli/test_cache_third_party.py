"""`llmc cache pack|unpack|explain` of other servers' compile caches, as a user runs them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llmc.artifacts.bundle.trust import UntrustedError
from llmc.artifacts.store.store import Store
from llmc.cli.cache import app
from llmc.errors import ArtifactError, InputError
from tests.artifacts.third_party.helpers import FACTORS, HASH, MAKERS, content, make_gaudi, make_jax, make_vllm, write
from tests.cli.cache_runs import data, error, output, run
from tests.cli.helpers import Llmc


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A host that has none of the servers, and trusts no key."""
    for name in ("VLLM_CACHE_ROOT", "XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR", "VLLM_XLA_CACHE_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LLMC_TRUSTED_KEYS", str(tmp_path / "no keys"))
    monkeypatch.setattr("llmc.artifacts.third_party.packing.versions", lambda _: iter(()))
    monkeypatch.setattr("llmc.artifacts.third_party.packing.versions", lambda _: iter(()))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def pack(store: Store, name: str, folder: Path, *arguments: str) -> str:
    """The key of a packed cache; JAX's without its path, so that it can be anywhere."""
    anywhere = ("--fact", "path=") if name == "jax" else ()
    key: str = data(store, "pack", name, folder, *anywhere, *arguments)["key"]
    return key


def test_pack_says_what_decides_and_the_key(store: Store, tmp_path: Path) -> None:
    lines = output(store, "pack", "vllm", make_vllm(tmp_path / "c"), "--fact", "model=Qwen/Qwen3-8B").splitlines()
    assert lines[0].startswith(f"packed vllm cache {tmp_path / 'c'}: 7 files, ")
    assert lines[1].split() == ["FACT", "VALUE"]
    assert lines[2].split(maxsplit=1) == ["compiler.0.device.name", "NVIDIA H100 80GB HBM3"]
    assert lines[-2] == "and 4 more facts; `llmc cache show KEY` lists all"
    assert lines[-1].startswith("key: sha256:")
    assert "already in the store" in output(store, "pack", "vllm", tmp_path / "c", "--fact", "model=Qwen/Qwen3-8B")


@pytest.mark.parametrize("name", MAKERS)
def test_a_cache_comes_back_where_its_server_looks(
    store: Store, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = tmp_path / "place"
    key = pack(store, name, MAKERS[name](tmp_path / "source"))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(location))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(location))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(location))
    monkeypatch.setenv("PT_HPU_RECIPE_CACHE_CONFIG", f"{location},false,8192")
    elsewhere = ("--allow", "path") if name == "triton" else ()
    done = data(store, "unpack", key, *elsewhere)
    folder = location / "neuron" / "compile_cache" if name == "vllm-neuron" else location
    assert done["folder"] == str(folder) and done["written"] and len(done["placed"]) == (2 if name == "vllm" else 1)
    source = content(tmp_path / "source")
    found = content(folder)
    assert found and all(source[path] == value for path, value in found.items())
    said = output(store, "unpack", key, *elsewhere).splitlines()[-1]
    assert said.startswith(f"unpacked {name} cache to {folder}") and "there already" in said


def test_another_model_version_or_gpu_is_refused_each_by_name(store: Store, tmp_path: Path) -> None:
    facts = ("--fact", "model=Qwen/Qwen3-8B", "--fact", "version.vllm=0.24.0")
    key = pack(store, "vllm", make_vllm(tmp_path / "c"), *facts)
    wrong = (
        "--expect",
        "model=Qwen/Qwen3-4B",
        "--expect",
        "version.vllm=0.25.0",
        "--expect",
        "device.name=NVIDIA H200",
    )
    location = tmp_path / "place"
    found = error(store, "unpack", key, "-o", location, *wrong)
    assert isinstance(found, ArtifactError) and found.exit_code == 5
    for part in (
        "model is Qwen/Qwen3-8B in the cache, Qwen/Qwen3-4B was expected",
        "version.vllm is 0.24.0 in the cache, 0.25.0 was expected",
        "compiler.0.device.name is NVIDIA H100 80GB HBM3 in the cache, NVIDIA H200 was expected",
    ):
        assert part in str(found)
    assert not location.exists()


def test_a_version_that_is_installed_here_counts(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.artifacts.third_party.base import VERSION, Fact

    key = pack(store, "jax", make_jax(tmp_path / "c"), "--fact", "version.jax=0.10.2")
    monkeypatch.setattr(
        "llmc.artifacts.third_party.packing.versions", lambda _: iter([Fact(f"{VERSION}jax", "0.11.0")])
    )
    found = str(error(store, "unpack", key, "-o", tmp_path / "place"))
    assert "not unpacked: version.jax is 0.10.2 in the cache, 0.11.0 here" in found
    said = output(store, "unpack", key, "-o", tmp_path / "place", "--allow", "version.jax")
    assert "allowed: version.jax is 0.10.2 in the cache, 0.11.0 here" in said


def test_a_cache_of_jax_belongs_to_its_folder(store: Store, tmp_path: Path) -> None:
    folder = make_jax(tmp_path / "c")
    key = data(store, "pack", "jax", folder)["key"]
    found = str(error(store, "unpack", key, "-o", tmp_path / "place"))
    assert f"not unpacked: path is {folder} in the cache, {tmp_path / 'place'} here" in found
    assert data(store, "unpack", key, "-o", folder)["present"]


def test_what_nobody_could_check_is_reported_and_strict_refuses_it(store: Store, tmp_path: Path) -> None:
    key = pack(store, "gaudi", make_gaudi(tmp_path / "c"), "--fact", "num_hpu_blocks=2100")
    location = ("-o", tmp_path / "place")
    assert "not checked, because their expected values are unknown here: device, num_hpu_blocks, synapse" in output(
        store, "unpack", key, *location
    )
    found = str(error(store, "unpack", key, *location, "--strict", "--expect", "num_hpu_blocks=2100"))
    assert "the expected value of device, synapse is unknown here; give it with --expect NAME=VALUE" in found
    known = ("--expect", "device=0a1b2c", "--expect", "synapse=1.22.0.638", "--expect", "num_hpu_blocks=2100")
    assert data(store, "unpack", key, *location, "--strict", *known)["unchecked"] == []


def test_a_dry_run_compares_and_writes_nothing(store: Store, tmp_path: Path) -> None:
    key = pack(store, "jax", make_jax(tmp_path / "c"))
    assert not data(store, "unpack", key, "-o", tmp_path / "place", "--dry-run")["written"]
    assert "nothing written (--dry-run)" in output(store, "unpack", key, "-o", tmp_path / "place", "--dry-run")
    assert not (tmp_path / "place").exists()


def test_other_content_needs_a_word(store: Store, tmp_path: Path) -> None:
    key = pack(store, "vllm", make_vllm(tmp_path / "c"))
    location = tmp_path / "place"
    write(location / "torch_compile_cache" / HASH / "own", "x")
    assert "--keep leaves it as it is" in str(error(store, "unpack", key, "-o", location))
    assert "1 part new, 1 part kept" in output(store, "unpack", key, "-o", location, "--keep")
    assert "1 part replaced, 1 part there already" in output(store, "unpack", key, "-o", location, "--replace")
    both = error(store, "unpack", key, "-o", location, "--keep", "--replace")
    assert isinstance(both, InputError) and "contradict each other" in str(both)


def test_without_a_place_it_requests_one(store: Store, tmp_path: Path) -> None:
    key = pack(store, "jax", make_jax(tmp_path / "c"))
    found = str(error(store, "unpack", key))
    assert "name it with -o, or set JAX_COMPILATION_CACHE_DIR or VLLM_XLA_CACHE_PATH as for the server" in found


def test_what_is_no_packed_cache_says_so(store: Store, tmp_path: Path) -> None:
    from tests.artifacts.helpers import key

    entry = store.publish(key(), {}, {})
    assert "not a packed cache" in str(error(store, "unpack", entry.key.hex, "-o", tmp_path / "place"))
    assert "unknown cache 'sglang'; known: gaudi, jax, triton, vllm, vllm-neuron" in str(
        error(store, "pack", "sglang", tmp_path)
    )
    assert "write it as NAME=VALUE" in str(error(store, "pack", "jax", make_jax(tmp_path / "c"), "--fact", "model"))


def test_explain_names_the_factor_that_differs_and_counts_files(store: Store, tmp_path: Path) -> None:
    one = pack(store, "vllm", make_vllm(tmp_path / "one"))
    config = {**FACTORS["config"], "dtype": "float16", "num_gpu_blocks": 1900}
    other = pack(store, "vllm", make_vllm(tmp_path / "other", config=config))
    lines = output(store, "explain", one, other).splitlines()
    assert lines[:2] == ["config.dtype: bfloat16 → float16", "config.num_gpu_blocks: 2100 → 1900"]
    assert lines[2].startswith("tree: sha256:")
    assert lines[3].startswith("2 with different content: torch_compile_cache/")
    found = data(store, "explain", one, other)
    assert [item["name"] for item in found["differences"]] == ["config.dtype", "config.num_gpu_blocks", "tree"]
    assert {side: len(names) for side, names in found["files"].items()} == {"differ": 2, "only_a": 0, "only_b": 0}
    assert "config.dtype: " in output(store, "explain", one), "the nearest other one"


def test_explain_of_two_builds_of_one_configuration_names_their_files(store: Store, tmp_path: Path) -> None:
    one = make_jax(tmp_path / "one")
    shutil.copytree(one, tmp_path / "other")
    write(tmp_path / "other" / ("jit_more-" + "ef" * 32 + "-cache"), b"x\x01")
    found = data(store, "explain", pack(store, "jax", one), pack(store, "jax", tmp_path / "other"))
    assert [item["name"] for item in found["differences"]] == ["compression", "tree"]
    assert found["files"]["only_b"] == ["jit_more-" + "ef" * 32 + "-cache"]


def test_an_archive_is_imported_and_unpacked_if_it_is_trusted(store: Store, tmp_path: Path) -> None:
    key = pack(store, "jax", make_jax(tmp_path / "c"))
    archive = tmp_path / "jax.tar"
    assert run(store, "export", archive, key).exit_code == 0
    other = Store(tmp_path / "other store")
    refused = error(other, "unpack", archive, "-o", tmp_path / "place")
    assert isinstance(refused, UntrustedError) and not (tmp_path / "place").exists()
    assert other.entries() == []
    done = data(other, "unpack", archive, "-o", tmp_path / "place", "--allow-unsigned")
    assert done["key"] == key
    assert content(tmp_path / "place").keys() == content(tmp_path / "c").keys() - {".lockfile"}


def test_from_the_job_that_packs_to_the_pod_that_unpacks(llmc: Llmc, keys: Path, tmp_path: Path) -> None:
    """CI packs, signs and pushes; a pod that trusts the key pulls and unpacks in one command, and one that does not
    takes nothing."""
    source = make_vllm(tmp_path / "source")
    key = llmc("cache", "pack", "vllm", source, "--json").json["key"]
    image = f"oci-layout:{tmp_path / 'images'}:v1"
    assert llmc("cache", "push", image, key[7:19], "--key", "release").code == 0
    location, pod = tmp_path / "place", ("--cache-dir", tmp_path / "pod")
    assert "native code" in llmc("cache", "unpack", image, "-o", location, *pod).failed(5)
    assert not location.exists()
    assert llmc("cache", "trust", "release.pub").code == 0
    done = llmc("cache", "unpack", image, "-o", location, "--expect", "tensor_parallel_size=2", *pod, "--json").json
    assert done["key"] == key and len(done["placed"]) == 2
    assert content(location).keys() == {path for path in content(source) if not path.startswith("modelinfos")}
    said = llmc("cache", "pull", image, "-o", location, *pod).failed(2)
    assert said == f"it is in the store, but -o is for bundles: unpack it with `llmc cache unpack {key[7:19]}`"


def test_a_cache_that_another_package_brings(tmp_path: Path) -> None:
    site = tmp_path / "site"
    write(site / "pocket_cache.py", POCKET)
    write(site / "llmc_pocket-1.0.dist-info" / "METADATA", "Metadata-Version: 2.1\nName: llmc-pocket\nVersion: 1.0\n")
    points = "[llmc.integrations]\npocket = pocket_cache:INTEGRATION\n"
    write(site / "llmc_pocket-1.0.dist-info" / "entry_points.txt", points)
    write(tmp_path / "c" / "a.pocket", "compiled")
    location = os.pathsep.join([str(site), *sys.path])
    environment = {
        **os.environ,
        "PYTHONPATH": location,
        "LLMC_CACHE_DIR": str(tmp_path / "store"),
        "POCKET": str(tmp_path / "p"),
    }

    def run_(*arguments: object) -> str:
        command = [sys.executable, "-m", "llmc", "cache", *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path).stdout

    key = json.loads(run_("pack", "pocket", tmp_path / "c", "--json"))["key"]
    assert "1 part new" in run_("unpack", key)
    assert (tmp_path / "p" / "a.pocket").read_text() == "compiled"


POCKET = """
from llmc.artifacts.third_party.base import Fact, ThirdPartyCache
from llmc.integrations.base import Integration

INTEGRATION = Integration(caches={"pocket": "pocket_cache:PocketCache"})

class PocketCache(ThirdPartyCache):
    name = "pocket"
    looks_like = "files called *.pocket"
    variables = ("POCKET",)

    def unit(self, path):
        return path

    def entries(self, tree):
        return [path for path in tree.files if path.endswith(".pocket")]

    def facts(self, tree):
        return [Fact("count", str(len(tree.files)))]

    def location(self, environment):
        return environment.get("POCKET")
"""


@pytest.mark.parametrize("command", ["pack", "unpack"])
def test_help_has_an_example(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert "Example:" in result.stdout and f"llmc cache {command} " in result.stdout
