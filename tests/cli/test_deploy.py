"""`llmc deploy`: from a bundle to files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from llmc.artifacts.digest import digest_bytes
from llmc.deploy import KINDS
from tests.cli.helpers import Llmc
from tests.deploy.bundles import GOLDEN

NODES = ("--image", "registry.example.com/llmc:1", "--bundle-image", "oci://registry.example.com/models/toy:v1")


@pytest.fixture(autouse=True)
def bundle(here: Path) -> None:
    shutil.copytree(GOLDEN, here / "bundle")


def test_files_are_written_once_and_shown(llmc: Llmc, here: Path) -> None:
    ran = llmc("deploy", "kubernetes", "--bundle", "bundle", *NODES, "-o", "base")
    assert (ran.code, ran.out) == (0, "") and ran.err.startswith("wrote deployment.yaml, ")
    kept = {path.name: path.read_text() for path in (here / "base").iterdir()}
    assert "would be replaced" in llmc(
        "deploy", "kubernetes", "--bundle", "bundle", *NODES, "--port", 9000, "-o", "base"
    ).failed(2)
    assert kept == {path.name: path.read_text() for path in (here / "base").iterdir()}
    assert llmc("deploy", "kubernetes", "--bundle", "bundle", *NODES, "--port", 9000, "-o", "base", "--force").code == 0
    assert yaml.safe_load((here / "base" / "service.yaml").read_text())["spec"]["ports"][0]["port"] == 9000
    said = llmc("deploy", "kubernetes", "--bundle", "bundle", *NODES, "--print", "--json").json
    assert {one["path"]: one["text"] for one in said["files"]} == kept
    assert all(one["digest"] == digest_bytes(one["text"].encode()) for one in said["files"])


def test_an_image_in_a_layout_is_read_and_nodes_need_one_in_a_registry(
    llmc: Llmc, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMC_ALLOW_UNSIGNED", "1")
    assert llmc("cache", "push", "oci-layout:images:v1", "bundle").code == 0
    image = ("deploy", "kubernetes", "--bundle", "oci-layout:images:v1")
    said = llmc(*image, "--image", "r.example.com/l", "--print").failed(2)
    assert said == "llmc deploy kubernetes needs --bundle-image"
    ran = llmc(*image, *NODES, "--print")
    assert ran.code == 0 and 'reference: "registry.example.com/models/toy:v1"' in ran.out


def test_what_is_requested_has_to_be_clear(llmc: Llmc, here: Path) -> None:
    assert "-o DIR to write the files to a folder, or --print to print them" in llmc("deploy", "docker").failed(2)
    assert f"known: {', '.join(KINDS.names())}" in llmc("deploy", "helm", "--print").failed(2)
    assert llmc("deploy", "docker", "--print").failed(2) == "llmc deploy docker needs --bundle"
    assert "is not one of image, pull" in llmc("deploy", "docker", "--bundle-volume", "x", "--print").failed(2)
    assert "no such file or folder" in llmc("deploy", "docker", "--bundle", "nothing", "--print").failed(5)


def test_another_servers_configuration(llmc: Llmc, here: Path) -> None:
    plan = ("--max-model-len", 2048, "--max-num-seqs", 4, "-o", "plan.json", "-q")
    assert llmc("plan", *plan).code == 0
    assert llmc("plan", "export", "plan.json", "--server", "vllm-gaudi", "-o", "conf").code == 0
    ran = llmc(
        "deploy",
        "vllm",
        "--server",
        "vllm-gaudi",
        "--configuration",
        "conf",
        "--model",
        "org/m",
        "--image",
        "v:1",
        "--print",
    )
    assert ran.code == 0, ran
    deployment, files, *_ = yaml.safe_load_all(ran.out.partition("# service.yaml")[0])
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "VLLM_BUCKETING_FROM_FILE", "value": "/etc/llmc/buckets.txt"} in container["env"]
    listed = files["data"]["buckets.txt"]
    assert listed.startswith("# prompt: ") and (here / "conf" / "buckets.txt").read_text().endswith(listed)
    assert container["resources"]["limits"]["habana.ai/gaudi"] == 1
