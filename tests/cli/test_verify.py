"""`llmc verify`: a bundle's files and numbers, again."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.artifacts.bundle.manifest import read_manifest
from llmc.artifacts.bundle.reader import blob_path
from llmc.testing.toy import write_toy
from tests.artifacts.helpers import flip, truncate
from tests.cli.conftest import BUNDLE
from tests.cli.helpers import Llmc
from tests.compiler import tiny
from tests.compiler.targets.onnxruntime.kernels.host import own_set
from tests.devices import negated, use
from tests.manifests import edit_manifest
from tests.tiers import default_cases


def test_a_sound_bundle_is_reported_in_two_lines(llmc: Llmc, bundle: Path) -> None:
    ran = llmc("verify", bundle)
    assert ran.code == 0
    first, second = ran.out.splitlines()
    assert first.startswith(f"{bundle}: files intact; ")
    assert all(
        words in first for words in ("against toy", "mean KL", "limit 1e-05", "top-1 agreement 100.0%", "leak 0")
    )
    assert second.startswith("accuracy over ") and "(limit 1e-05 for exact)" in second


@default_cases(1)
@pytest.mark.parametrize("kernels", ["llmc", "onnxruntime"])
def test_a_bundle_is_held_to_what_its_compile_was_held_to(llmc: Llmc, tmp_path: Path, kernels: str) -> None:
    model = tiny.write_model(tmp_path / "model", "llama")
    options = ["--device", "onnxruntime", "--quantize", "int8", "--kernels", kernels]
    if kernels == "llmc":  # of this model's few rows half are near ties, which bfloat16 turns
        options += ["--kv-cache-dtype", "f16"]
    own_set()
    built = llmc("compile", model, *options, "--max-model-len", 32, "--max-num-seqs", 2, "-o", "real", "--json").json
    again = llmc("verify", "real", "--json").json
    recorded = built["verification"]
    assert again["limits"] == recorded["limits"]
    assert again["accuracy"] == recorded["accuracy"] and again["mean_kl"] == recorded["mean_kl"]


def test_json_has_the_numbers_and_the_limits(llmc: Llmc, bundle: Path) -> None:
    ran = llmc("verify", bundle, "--json")
    found = ran.json
    assert ran.err == ""
    assert found["reference"] == "toy"
    assert set(found["limits"]) == {"mean_kl", "top1", "greedy_equal", "bucket_kl", "row_kl", "quality"}
    assert {
        "executables",
        "buckets",
        "twice",
        "longest",
        "rows",
        "mean_kl",
        "max_kl",
        "top1",
        "max_abs",
        "leak",
    } <= set(found)
    assert found["greedy_equal"] == found["greedy_sequences"] > 0
    accuracy = found["accuracy"]
    assert accuracy["tokens"] > 300 and accuracy["top1"] == 1.0
    assert 0 <= accuracy["mean_kl"] <= accuracy["p99_kl"] <= accuracy["max_kl"] < 1e-6


def test_accuracy_is_measured_anew_and_is_what_the_manifest_says(llmc: Llmc, bundle: Path) -> None:
    recorded = read_manifest(bundle).verification["accuracy"]
    edit_manifest(bundle, lambda manifest: manifest["verification"]["accuracy"].update(mean_kl=1.0))
    assert llmc("verify", bundle, "--json").json["accuracy"] == recorded


def test_all_takes_every_bucket(llmc: Llmc, toy: Path) -> None:
    ranges = ("--prompt-seq", "4,4,28", "--decode-seq", "8,4,32")
    llmc("compile", toy, "--device", "fake", "--max-model-len", 32, "--max-num-seqs", 4, *ranges, "-o", "many")
    buckets = len(read_manifest(Path("many")).executables)
    sampled = llmc("verify", "many", "--json").json
    assert sampled["executables"] == sampled["buckets"] == buckets > sampled["twice"]
    assert llmc("verify", "many", "--all", "--json").json["buckets"] == buckets


def test_numbers_are_taken_anew_whatever_was_verified_before(
    llmc: Llmc, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert llmc("verify", bundle).code == 0
    use(monkeypatch, replay=negated)
    assert "disagree with the reference model" in llmc("verify", bundle, "-q").failed(4)


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
def test_damaged_files_are_found_before_any_number(llmc: Llmc, bundle: Path, damage: object) -> None:
    manifest = read_manifest(bundle)
    damage(blob_path(bundle, manifest.files["weights"]))  # type: ignore[operator]
    message = llmc("verify", bundle).failed(5)
    assert manifest.files["weights"] in message
    assert "llmc compile" in message and f"-o {bundle}" in message


@default_cases(2)
@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "no manifest.json in it"), ("", "manifest.json"), ("{", "manifest.json"), ("[]", "manifest.json")],
)
def test_what_is_no_bundle_is_an_artifact_error(llmc: Llmc, bundle: Path, text: str | None, words: str) -> None:
    file = bundle / "manifest.json"
    file.unlink()
    if text is not None:
        file.write_text(text)
    assert words in llmc("verify", bundle).failed(5)
    assert "no such file or folder" in llmc("verify", "nowhere").failed(5)


def test_the_reference_may_be_a_copy_of_the_checkpoint_and_nothing_else(
    llmc: Llmc, here: Path, toy: Path, tmp_path: Path
) -> None:
    assert llmc("compile", toy, *BUNDLE).code == 0
    bundle = here / "bundle"
    toy.rename(tmp_path / "moved")
    assert f"{toy}: no such file or folder" in llmc("verify", bundle).failed(1)
    assert llmc("verify", bundle, "--reference", tmp_path / "moved").code == 0
    other = write_toy(tmp_path / "other", seed=1)
    message = llmc("verify", bundle, "--reference", other).failed(1)
    assert f"{other} is not the checkpoint that {bundle} was compiled from" in message


def test_a_bundle_of_another_device_version_is_refused(llmc: Llmc, bundle: Path) -> None:
    edit_manifest(bundle, lambda manifest: manifest["toolchain"].update(fake="0.9"))
    assert "compiled with the fake device 0.9" in llmc("verify", bundle, "-q").failed(5)


def test_progress_goes_to_standard_error_and_q_leaves_it_out(llmc: Llmc, bundle: Path) -> None:
    assert "verify: " in llmc("verify", bundle).err
    assert llmc("verify", bundle, "-q").err == ""
