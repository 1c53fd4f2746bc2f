"""Options that a kind does not take, needs, or cannot use end in one error that says which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.bundle.kernel_sets import KERNEL_SETS
from llmc.deploy.base import write
from llmc.errors import ArtifactError, InputError, LlmcError, UnknownNameError
from tests.deploy.bundles import facts, files, on

WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "means nothing": ("systemd", {"namespace": "x"}, "--namespace has no effect on llmc deploy systemd; leave it out"),
    "needs": ("kubernetes", {"image": None}, "llmc deploy kubernetes needs --image"),
    "label": (
        "kubernetes",
        {"namespace": "Not_A.Name"},
        "--namespace 'Not_A.Name' is not a Kubernetes name.* not-a-name",
    ),
    "long label": ("kubernetes", {"name": "a" * 54}, "--name .* at most 53"),
    "namespace to allow": ("kubernetes", {"allow_from": ("a b",)}, "--allow-from 'a b' is not a Kubernetes name"),
    "image": ("kubernetes", {"image": "a b:$(x)"}, "--image 'a b:.* is not the name of a container image"),
    "layout": (
        "kubernetes",
        {"bundle_image": "oci-layout:x"},
        "--bundle-image 'oci-layout:x' is a folder",
    ),
    "no reference": ("kubernetes", {"bundle_image": "registry/x"}, "is not an image name: oci://"),
    "replicas": ("kubernetes", {"replicas": 5}, "--max-replicas 4 is below --replicas 5"),
    "unsigned code": ("kubernetes", {"pull": True}, "native code.*--trusted-keys"),
    "padding": ("gitlab", {"max_padding": "5%"}, "--max-padding needs recorded requests.*--traffic"),
    "no server": ("vllm", {"server": "sglang"}, "unknown vLLM server 'sglang'; known: tpu-inference, vllm, vllm-gaudi"),
    "no plan": ("vllm", {"bundle": None, "bundle_path": None}, "needs a plan: --configuration"),
    "no device": ("vllm", {"server": "tpu-inference"}, "choose one with --device"),
    "no tool": ("vllm", {"cache_image": "oci://r.example.com/c:1"}, "name an image that has llmc with --tool-image"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_used_is_named(case: str, tmp_path: Path) -> None:
    kind, given, said = WRONG[case]
    with pytest.raises(InputError, match=said):
        files(kind, facts(tmp_path / "bundle"), **given)


def test_a_device_whose_software_no_package_has_needs_its_image(tmp_path: Path) -> None:
    gaudi = facts(tmp_path / "bundle", on("hpu"))
    with pytest.raises(InputError, match=r"hpu needs an image with Intel's Gaudi software .* --base-image"):
        files("docker", gaudi)
    assert 'ARG BASE="vault/gaudi:1"' in files("docker", gaudi, base_image="vault/gaudi:1")["Dockerfile"]
    with pytest.raises(InputError, match=r"a certificate for hpu must be created on that device.*--runner"):
        files("github-actions", gaudi)


def test_a_slice_of_several_hosts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="tpu:v5e-4x4 is a slice of 4 hosts, and a server runs on one"):
        files("kubernetes", facts(tmp_path / "bundle", on("tpu:v5e-4x4")))


def test_kernels_are_not_loaded_from_an_image_volume(tmp_path: Path) -> None:
    bundle = facts(
        tmp_path / "bundle",
        lambda document: document["files"].update({KERNEL_SETS[0].file: document["files"]["weights"]}),
    )
    with pytest.raises(InputError, match="cannot be loaded from an image volume"):
        files("kubernetes", bundle)
    assert files("kubernetes", bundle, pull=True, trusted_keys="keys")


def test_an_unknown_device_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown device 'abacus'"):
        facts(tmp_path / "bundle", on("abacus"))


def test_options_that_no_compile_writes_are_refused(tmp_path: Path) -> None:
    bundle = facts(tmp_path / "bundle", lambda document: document["options"].update(quantize="int8; rm -rf /"))
    for kind in ("docker", "gitlab", "github-actions"):
        with pytest.raises(ArtifactError, match=r"options\.quantize in its manifest is 'int8; rm"):
            files(kind, bundle)


def test_compose_mounts_folders_alone(tmp_path: Path) -> None:
    with pytest.raises(LlmcError, match=r"oci://r/x is not a folder that a container can mount"):
        files("compose", facts(tmp_path / "bundle"), bundle_path="oci://r/x")


def test_a_bundle_that_is_named_by_its_image_is_there_for_nodes(tmp_path: Path) -> None:
    reference = "oci://r.example.com/models/toy:v2"
    found = files("kubernetes", facts(tmp_path / "bundle"), bundle_path=reference, bundle_image=None)
    assert 'reference: "r.example.com/models/toy:v2"' in found["deployment.yaml"]


def test_a_number_of_servers_without_a_largest_one(tmp_path: Path) -> None:
    assert "\n  replicas: 9\n" in files("vllm", facts(tmp_path / "bundle"), replicas=9)["deployment.yaml"]


@pytest.mark.parametrize("kind", ["docker", "github-actions", "gitlab"])
def test_llmc_is_installed_from_its_wheel_alone(kind: str, tmp_path: Path) -> None:
    """On PyPI `llmc` is another project."""
    lines = [line for text in files(kind, facts(tmp_path / "bundle")).values() for line in text.splitlines()]
    installs = [line for line in lines if "pip install" in line]
    assert installs and all(
        "llmc_compiler-*.whl)[" in line or '"${WHEEL:-$GITHUB_ACTION_PATH}[' in line for line in installs
    )


def test_images_have_the_versions_that_compiled_the_bundle(tmp_path: Path) -> None:
    def compiled(document: dict[str, Any]) -> None:
        version = {"python": "3.11.7", "llmc": "0.1.0", "torch": "2.13.0+cpu", "numpy": "2.4.6\n--pre", "a b": "1"}
        document["provenance"] = {"runDetails": {"builder": {"version": version}}}
        document["toolchain"] = {"onnxruntime": "1.31.1", "LIBTPU_INIT_ARGS": "--flag", "fake": "1"}

    bundle = facts(tmp_path / "bundle", compiled)
    assert files("docker", bundle)["constraints.txt"] == "onnxruntime==1.31.1\ntorch==2.13.0\n"
    assert facts(tmp_path / "other", lambda d: d.update(provenance={"runDetails": 1}, toolchain={})).constraints == ""


def test_what_is_there_is_replaced_when_requested_to(tmp_path: Path) -> None:
    write(tmp_path, {"a/b": "1", "c": "2"})
    write(tmp_path, {"a/b": "1", "c": "2"})  # the same again is no replacement
    with pytest.raises(InputError, match=r"/c would be replaced.*--force"):
        write(tmp_path, {"a/b": "1", "c": "3", "d": "4"})
    assert (tmp_path / "c").read_text() == "2" and not (tmp_path / "d").exists()
    write(tmp_path, {"c": "3"}, force=True)
    assert (tmp_path / "c").read_text() == "3"


def test_a_dangling_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "c").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="would be replaced"):
        write(tmp_path, {"c": "3"})
    write(tmp_path, {"c": "3"}, force=True)
    assert not (tmp_path / "elsewhere").exists() and not (tmp_path / "c").is_symlink()


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot create the folder .*file"):
        write(tmp_path / "file", {"a": "1"})
