"""`llmc compile --resume` and `llmc warmup` of a portable bundle, as typed on its device's host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmc.runtime.executors.fake import device as fake_device
from llmc.runtime.executors.fake.device import FakeGpu
from tests.cli.conftest import BUNDLE
from tests.cli.helpers import Llmc

PORTABLE = ("--device", "fake:portable", *BUNDLE[2:])


@pytest.fixture
def bundle(llmc: Llmc, toy: Path, here: Path) -> Path:
    """A portable bundle."""
    found = llmc("compile", toy, *PORTABLE, "--json").json
    assert (found["native"], found["on_target"]) == (0, {})
    return here / "bundle"


@pytest.fixture
def device(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on this host has a GPU."""
    monkeypatch.setattr(fake_device, "here", FakeGpu())


def states(bundle: Path) -> set[str]:
    return {item["state"] for item in json.loads((bundle / "manifest.json").read_bytes())["executables"]}


@pytest.mark.usefixtures("device")
def test_resume_finishes_in_place(llmc: Llmc, bundle: Path) -> None:
    found = llmc("compile", "--resume", "-o", "bundle", "--json", "-j", 2, "-q").json
    assert (found["portable"], found["reused"]) == (0, 0) and found["native"] == found["built"] > 0
    assert found["built_for"] == {"gpu": "fake-1", "driver": "1.0"}
    assert states(bundle) == {"native"}
    ran = llmc("compile", "--resume", "-o", "bundle", "-q")
    assert f"compiled for driver 1.0, gpu fake-1: built 0, from the store {found['native']}" in ran.out
    assert f"native {found['native']}, portable 0" in ran.out and "against its portable executables" in ran.out


@pytest.mark.usefixtures("device")
def test_the_command_that_compiles_finishes_where_the_device_is(llmc: Llmc, toy: Path, bundle: Path) -> None:
    ran = llmc("compile", toy, *PORTABLE, "--require-native")
    assert ran.code == 0 and "portable 0" in ran.out and "compiled for driver 1.0, gpu fake-1" in ran.out
    assert "left for the device's own host" not in ran.out and states(bundle) == {"native"}


def test_elsewhere_the_command_says_what_is_missing(llmc: Llmc, toy: Path, bundle: Path) -> None:
    refused = llmc("compile", "--resume", "-o", bundle).failed(3)
    assert "cannot be compiled here: this host has no fake device" in refused
    assert "no fake device" in llmc("compile", toy, *PORTABLE, "--require-native").failed(3)
    assert llmc("warmup", bundle, "-q").code == 0 and states(bundle) == {"portable"}


@pytest.mark.usefixtures("device")
def test_warm_up_finishes_first_unless_it_is_reported_not_to(llmc: Llmc, bundle: Path) -> None:
    assert llmc("warmup", bundle, "--no-compile", "-q").code == 0 and states(bundle) == {"portable"}
    ran = llmc("warmup", bundle, "--json")
    assert ran.json["compilations"] == [] and states(bundle) == {"native"}
    assert "compiled for driver 1.0, gpu fake-1" in ran.err
    assert "compiled for" not in llmc("warmup", bundle, "--json").err


@pytest.mark.usefixtures("device")
def test_warm_up_on_another_gpu_finishes_again(llmc: Llmc, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llmc("warmup", bundle, "-q").code == 0
    monkeypatch.setattr(fake_device, "here", FakeGpu("fake-2"))
    refused = llmc("generate", bundle, "--prompt", "hello", "-q").failed(5)
    assert "compiled for another gpu fake-1 (here: fake-2)" in refused
    assert "gpu fake-2" in llmc("warmup", bundle).err
    assert llmc("generate", bundle, "--prompt", "hello", "--max-tokens", 2, "-q").code == 0


@pytest.mark.usefixtures("device")
def test_the_portable_half_runs_where_there_is_no_device(
    llmc: Llmc, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert llmc("warmup", bundle, "-q").code == 0
    said = llmc("generate", bundle, "--prompt", "hello", "--max-tokens", 2, "--json", "-q").json["token_ids"]
    monkeypatch.setattr(fake_device, "here", None)
    assert "this host has no such device" in llmc("generate", bundle, "--prompt", "hello").failed(3)
    monkeypatch.setenv("LLMC_OPEN_PORTABLE", "1")
    assert llmc("generate", bundle, "--prompt", "hello", "--max-tokens", 2, "--json", "-q").json["token_ids"] == said


@pytest.mark.usefixtures("device")
def test_a_bundle_in_a_store_stays_as_it_is(llmc: Llmc, bundle: Path) -> None:
    assert llmc("cache", "export", "bundle.tar", bundle, "-q").code == 0
    ran = llmc("warmup", "bundle.tar", "-q")
    assert ran.code == 0 and "is inside a store" in ran.err and "llmc cache pull" in ran.err
