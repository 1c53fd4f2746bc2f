"""`llmc cache export|import`, and archives where a bundle is asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmc.artifacts.bundle.manifest import Manifest
from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.store.store import Store
from llmc.cli.cache import app
from tests.artifacts.helpers import flip
from tests.artifacts.oci.helpers import make_bundle
from tests.artifacts.third_party.helpers import make_jax
from tests.cli.helpers import Llmc
from tests.manifests import write_manifest

PROMPT = ("--prompt", "a river", "--max-tokens", 4, "--ignore-eos", "--json")


@pytest.fixture(autouse=True)
def _unsigned(llmc: Llmc, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundles here are native and not signed; test_unsigned_code.py has what happens then."""
    monkeypatch.setenv("LLMC_ALLOW_UNSIGNED", "1")


def test_a_bundle_goes_through_one_file(llmc: Llmc, bundle: Path, here: Path) -> None:
    done = llmc("cache", "export", "b.tar", "bundle", "--json").json
    assert done["images"] == 1 and done["bytes"] == (here / "b.tar").stat().st_size
    ran = llmc("cache", "import", "b.tar", "-o", "again", "--cache-dir", here / "other")
    assert ran.code == 0 and ran.err == ""
    line, location = ran.out.splitlines()
    assert line.startswith("imported 1 entry from b.tar: ") and location == f"bundle: {here / 'again'}"
    assert BundleFiles.open(here / "again").manifest == BundleFiles.open(bundle).manifest
    assert BundleFiles.open(here / "again").verify() == []


def test_export_says_what_it_wrote(llmc: Llmc, bundle: Path) -> None:
    ran = llmc("cache", "export", "b.tar", "bundle")
    assert ran.out.startswith("exported 1 image to b.tar: ") and ran.err == ""


def test_every_bundle_and_packed_cache_of_the_store_is_the_default(
    llmc: Llmc, bundle: Path, here: Path, tmp_path: Path
) -> None:
    llmc("cache", "pack", "jax", make_jax(tmp_path / "jax"))
    images = {
        entry.key for entry in Store(tmp_path / "cache").entries() if entry.key.kind in ("bundle", "foreign-cache")
    }
    assert len(images) == 2 == llmc("cache", "export", "all.tar", "--json").json["images"]
    assert llmc("cache", "import", "all.tar", "--cache-dir", "other", "--json").json["entries"] == 2
    assert {entry.key for entry in Store(here / "other").entries()} == images
    again = llmc("cache", "import", "all.tar", "--cache-dir", "other", "--json").json
    assert again["skipped_blobs"] > 2 and again["bytes"] < 100_000
    assert "the archive holds 2 images" in llmc("cache", "import", "all.tar", "-o", "out").failed(2)


def test_what_is_incomplete_is_left_out_and_said(llmc: Llmc, bundle: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    lost = make_bundle(store)
    store.path(lost.outputs["manifest.json"]).unlink()
    ran = llmc("cache", "export", "all.tar")
    assert ran.code == 0 and "left out 1 entry whose blobs are missing" in ran.err


def test_keys_and_references_name_what_is_exported(llmc: Llmc, bundle: Path, here: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    (entry,) = store.entries("bundle")
    for number, name in enumerate((entry.key.short, f"store:{entry.key.short}", "bundle", "./bundle")):
        assert llmc("cache", "export", f"{number}.tar", name).code == 0
    assert len({(here / f"{number}.tar").read_bytes() for number in range(4)}) == 1
    assert llmc("cache", "export", "again.tar", "0.tar").code == 0
    assert (here / "again.tar").read_bytes() == (here / "0.tar").read_bytes()
    executable = store.entries("executable")[0]
    assert "neither a bundle nor a packed cache" in llmc("cache", "export", "e.tar", executable.key.short).failed(5)


def test_it_goes_through_a_pipe(llmc: Llmc, bundle: Path, here: Path) -> None:
    llmc("cache", "export", "b.tar", "bundle")
    llmc_ = f"{sys.executable} -m llmc cache"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = f"{llmc_} export - bundle | tee piped.tar | {llmc_} import - -o piped --cache-dir other"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True, env=environment)
    assert (here / "piped.tar").read_bytes() == (here / "b.tar").read_bytes()
    assert done.stderr.startswith("exported 1 image to -") and "bundle: " in done.stdout
    assert BundleFiles.open(here / "piped").verify() == []


def test_an_archive_is_a_bundle_wherever_one_is_requested(llmc: Llmc, bundle: Path, here: Path) -> None:
    llmc("cache", "export", "b.tar", "bundle")
    expected = llmc("generate", "bundle", *PROMPT).json["token_ids"]
    digest = BundleFiles.open(bundle).manifest.digest
    for name in ("b.tar", f"store:{digest[7:19]}"):
        for _ in range(2):
            assert llmc("generate", name, *PROMPT).json["token_ids"] == expected
        assert llmc("verify", name, "--json").json["top1"] == 1.0
        assert llmc("bench", name, "--seconds", 0, "--json").code == 0
        assert llmc("cache", "show", name, "--json").json["device"] == "fake"
        assert llmc("cache", "verify", name, "--json").json["bad"] == []
        assert llmc("cache", "explain", name, "bundle").out == "no component differs\n"


def test_a_torn_archive_is_one_line_and_5(llmc: Llmc, bundle: Path, here: Path) -> None:
    llmc("cache", "export", "b.tar", "bundle")
    (here / "b.tar").write_bytes((here / "b.tar").read_bytes()[:-15000])
    for command in (("cache", "import"), ("generate",)):
        arguments = PROMPT[:2] if command == ("generate",) else ()
        message = llmc(*command, "b.tar", *arguments).failed(5)
        assert message.startswith("b.tar: not an intact archive of `llmc cache export` (")


def test_a_signature_can_be_required(llmc: Llmc, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llmc("cache", "export", "b.tar", "bundle")
    assert "not signed" in llmc("cache", "import", "b.tar", "--require-signature").failed(5)
    monkeypatch.setenv("LLMC_REQUIRE_SIGNATURES", "1")
    monkeypatch.setenv("LLMC_TRUSTED_KEYS", str(bundle.parent / "keys"))
    assert "not signed" in llmc("cache", "import", "b.tar").failed(5)
    assert "not signed" in llmc("generate", "b.tar", *PROMPT).failed(5)


def test_a_signed_bundle_passes_and_a_wrong_signature_never(
    llmc: Llmc, bundle: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMC_TRUSTED_KEYS", str(here / "keys"))
    assert llmc("cache", "keygen", "private").code == 0
    assert llmc("cache", "sign", "bundle", "--key", "private").code == 0
    llmc("cache", "export", "b.tar", "bundle")
    assert llmc("cache", "import", "b.tar", "--cache-dir", "a").code == 0
    assert "not trusted here" in llmc("cache", "import", "b.tar", "--cache-dir", "b", "--require-signature").failed(5)
    assert llmc("cache", "trust", "private.pub").code == 0
    done = llmc("cache", "import", "b.tar", "--cache-dir", "b", "--require-signature", "-o", "out", "--json").json
    assert done["bundle"] == str(here / "out")
    data = json.loads((here / "out" / "manifest.json").read_bytes())
    write_manifest(here / "bundle", Manifest(data | {"llmc": "9"}).to_bytes())
    llmc("cache", "export", "wrong.tar", "bundle")
    assert "signature is not valid" in llmc("cache", "import", "wrong.tar").failed(5)


def test_mistakes_are_reported(llmc: Llmc, bundle: Path, tmp_path: Path, here: Path) -> None:
    assert "name an archive" in llmc("cache", "export", "b.tgz", "bundle").failed(2)
    assert "--json and the archive" in llmc("cache", "export", "-", "bundle", "--json").failed(2)
    assert "no bundle in" in llmc("cache", "export", "b.tar", "--cache-dir", tmp_path / "empty").failed(2)
    assert "not a bundle" in llmc("cache", "export", "b.tar", "./nowhere").failed(5)
    assert "No such file" in llmc("cache", "import", "b.tar").failed(5)
    flip(BundleFiles.open(bundle).path("tokenizer.json"))
    assert "was altered" in llmc("cache", "export", "b.tar", "bundle", "--cache-dir", tmp_path / "empty").failed(5)
    assert not (here / "b.tar").exists()


@pytest.mark.parametrize("command", ["export", "import"])
def test_help_has_an_example(command: str) -> None:
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0 and f"\n    llmc cache {command}" in result.stdout and "--json" in result.stdout
