"""`llmc compile --config`, and the weights that `generate`, `serve` and `verify` bind to its bundle."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.bundle.manifest import read_manifest
from llmc.buckets.plan import Plan
from tests.cli.helpers import Llmc, Ran
from tests.tiers import full

LIMITS = ("--max-model-len", 16, "--max-num-seqs", 1, "--max-num-batched-tokens", 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama, and the store and bundles of this module."""
    from tests.compiler import tiny

    built = tmp_path_factory.mktemp("weights")
    tiny.write_model(built / "llama", "llama")
    return built


@pytest.fixture
def run(llmc: Llmc, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Llmc:
    """The command line over that store."""
    monkeypatch.setenv("LLMC_CACHE_DIR", str(folder / "store"))
    return llmc


def compiled(run: Llmc, folder: Path, *arguments: object) -> Ran:
    config = folder / "llama" / "config.json"
    return run("compile", "--config", config, "--device", "hpu", *LIMITS, "-o", folder / "bundle", *arguments)


@pytest.fixture
def bundle(run: Llmc, folder: Path) -> Path:
    if not (folder / "bundle").exists():
        assert compiled(run, folder, "-q").code == 0
    return folder / "bundle"


@full
def test_a_configuration_alone_is_compiled_and_said_not_to_be_verified(run: Llmc, folder: Path) -> None:
    ran = compiled(run, folder)
    assert ran.code == 0, ran
    assert "not verified: no weights: verify with llmc verify BUNDLE --reference MODEL" in ran.out.splitlines()
    found = compiled(run, folder, "--json").json
    assert (found["built"], found["weights_bytes"]) == (0, 0)
    assert "tokenizer.json" in read_manifest(folder / "bundle").files


@full
def test_a_folder_means_its_config_and_the_bundle_is_named_after_it(run: Llmc, folder: Path, here: Path) -> None:
    assert run("compile", "--config", folder / "llama", "--device", "hpu", *LIMITS, "-q").code == 0
    assert "tensors.json" in read_manifest(here / "llama-hpu.llmc").files
    shutil.copy(folder / "llama" / "config.json", here / "small.json")
    assert run("compile", "--config", "small.json", "--device", "hpu", *LIMITS, "-q").code == 0
    assert (here / "small-hpu.llmc").is_dir()


def test_what_cannot_be_compiled_from_a_configuration_is_refused(run: Llmc, folder: Path, tmp_path: Path) -> None:
    config = folder / "llama" / "config.json"
    both = run("compile", folder / "llama", "--config", config, "--device", "hpu", *LIMITS)
    assert both.failed(2) == "MODEL and --config were both given; give one of them"
    plan = tmp_path / "plan.json"
    assert run("plan", "--config", config, *LIMITS, "-o", plan).code == 0
    both = run("compile", folder / "llama", "--config", config, "--device", "hpu", "--plan", plan)
    assert both.failed(2) == "MODEL and --config were both given; give one of them"
    assert Plan.load(plan).limits.max_model_len == 16
    weights = run("compile", "--config", folder / "llama" / "model.safetensors", "--device", "hpu", *LIMITS)
    assert weights.failed(2).endswith("model.safetensors: not a config.json; to compile a checkpoint, give it as MODEL")
    assert "needs the weights to compile" in run("compile", "--config", config, *LIMITS).failed(2)
    full = run("compile", "--config", config, "--device", "hpu", *LIMITS, "--verify", "all")
    assert full.failed(2).startswith("--verify all needs weights to compare with")
    assert "no such file" in run("compile", "--config", "none.json", "--device", "hpu", *LIMITS).failed(1)


def test_dry_run_estimates_a_configuration(run: Llmc, folder: Path) -> None:
    found = compiled(run, folder, "--dry-run", "--json").json
    assert found["device"] == "hpu"
    assert len(found["executables"]) >= 2


@full
def test_generate_takes_the_weights(run: Llmc, folder: Path, bundle: Path) -> None:
    prompt = ("--prompt", "abc", "--max-tokens", 4, "--ignore-eos", "--json", "--threads", 1)
    ordinary = run("compile", folder / "llama", "--device", "hpu", *LIMITS, "--verify", "none", "-o", "ordinary", "-q")
    assert ordinary.code == 0, ordinary
    expected = run("generate", "ordinary", *prompt).json
    bound = run("generate", bundle, "--weights", folder / "llama", *prompt).json
    assert (bound["token_ids"], bound["text"]) == (expected["token_ids"], expected["text"])
    assert "already has weights" in run("generate", "ordinary", "--weights", folder / "llama", *prompt).failed(2)
    assert "no such file or folder" in run("generate", bundle, "--weights", "nowhere", *prompt).failed(1)


@full
def test_verify_binds_the_reference_first(run: Llmc, folder: Path, bundle: Path) -> None:
    found = run("verify", bundle, "--reference", folder / "llama", "--all", "--json").json
    assert found["buckets"] == len(read_manifest(bundle).executables)
    assert found["top1"] == 1.0
    assert found["leak"] == 0.0
    message = run("verify", bundle).failed(2)
    assert message.endswith("compiled from a configuration alone: name its weights with --reference MODEL")


def test_serve_opens_the_bundle_with_the_weights(
    run: Llmc, folder: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []
    reported: list[Any] = []

    def serve(config: Any, open_bundle: Any, **more: Any) -> int:
        opened.append(open_bundle(reported.append))
        return 0

    monkeypatch.setattr("llmc.server.serve.serve", serve)
    assert run("serve", bundle, "--weights", folder / "llama").code == 0
    assert {"weights", "weights.json", "tensors.json"} <= set(read_manifest(opened[0]).files)
    assert "no such file or folder" in run("serve", bundle, "--weights", "nowhere").failed(1)
    assert run("serve", bundle).code == 0
    assert opened[1] == bundle
