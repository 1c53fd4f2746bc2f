"""A host of the Neuron SDK, made of the fakes: neuronx-cc on PATH, and NeuronCores with nrtpy."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from llmc.runtime.executors.neuron import executor

ROOT = Path(__file__).parents[3]


def with_compiler(patch: pytest.MonkeyPatch, folder: Path, mode: str = "", chip: str = "trn2") -> None:
    """neuronx-cc on PATH, failing as `mode` says, on a host that is told to compile for `chip`."""
    binaries = folder / "bin"
    binaries.mkdir(exist_ok=True)
    tool = binaries / "neuronx-cc"
    tool.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m tests.fakes.neuron.neuronx_cc "$@"\n')
    tool.chmod(0o755)
    patch.setenv("PATH", f"{binaries}{os.pathsep}{os.environ['PATH']}")
    patch.setenv("FAKE_NEURONX_CC", mode)
    patch.setenv("FAKE_NEURONX_CC_MARKS", str(binaries))
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    patch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", chip)


def with_cores(patch: pytest.MonkeyPatch, folder: Path, instance: str = "trn2.48xlarge") -> None:
    """NeuronCores of an instance, and nrtpy."""
    patch.syspath_prepend(str(Path(__file__).parent))
    (folder / "product_name").write_text(f"{instance}\n")
    (folder / "neuron0").touch()
    patch.setattr(executor, "INSTANCE", folder / "product_name")
    patch.setattr(executor, "DEVICE", folder / "neuron0")
    import nrtpy

    nrtpy.reset()
    patch.setattr(nrtpy, "chip", instance.partition(".")[0])
    patch.setattr(nrtpy, "cores", 2 if instance.startswith("trn2") else 1)
