"""A host with HyperDex, the fake one of tests/fakes in an interpreter of its own, and a tiny Llama compiled there."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.store.store import Store
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import CompileResult, compile_bundle
from llmc.compiler.pipeline.planning import plan_for
from llmc.compiler.stages import StageReport
from llmc.runtime.bundle import Bundle
from llmc.settings import Settings
from tests.compiler import tiny

FAKES = Path(__file__).parent / "fakes"
VERSION = "1.5.1"
CASE = "llama"
LENGTH = 48


def interpreter(folder: Path, packages: Path = FAKES) -> Path:
    """A Python that finds HyperDex in `packages`."""
    path = folder / "hyperdex-python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{packages}" exec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return path


def another_version(folder: Path, version: str) -> Path:
    """A Python whose HyperDex says that it is of `version`."""
    packages = folder / "packages"
    about = packages / f"hyperdex_toolchain-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: hyperdex-toolchain\nVersion: {version}\n")
    (packages / "hyperdex").symlink_to(FAKES / "hyperdex")
    return interpreter(folder, packages)


@dataclass
class LpuHost:
    """A model, a store, and a bundle of it for two LPUs."""

    model: Path
    store: Store
    bundle: Path
    settings: Settings

    def compile(self, path: Path | None = None, **given: Any) -> tuple[CompileResult, set[str]]:
        """Compile again; the outcome, and the stages that were not in the store."""
        built: set[str] = set()
        settings = given.pop("settings", self.settings)
        device = given.pop("device", "lpu:2")
        length = given.pop("max_model_len", LENGTH)

        def keep(event: object) -> None:
            if isinstance(event, StageReport) and event.seconds is not None and not event.cached:
                built.add(event.name)

        plan = plan_for(str(self.model), max_model_len=length, device=device, settings=settings)
        options = CompileOptions.of(device, **{"verify": "none", **given})
        result = compile_bundle(str(self.model), path or self.bundle, plan, options, self.store, keep, settings)
        return result, built

    def open(self, **settings: Any) -> Bundle:
        """The bundle, under these settings."""
        return Bundle.open(self.bundle, replace(self.settings, **settings))


@pytest.fixture(scope="session")
def lpu(tmp_path_factory: pytest.TempPathFactory) -> LpuHost:
    folder = tmp_path_factory.mktemp("lpu")
    settings = replace(Settings.from_environment({}), hyperdex_python=str(interpreter(folder)))
    model = tiny.write_model(folder / "model", CASE)
    host = LpuHost(model, Store(folder / "store"), folder / "bundle", settings)
    host.compile()
    return host
