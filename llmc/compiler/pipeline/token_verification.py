"""Verify bundles whose device returns only tokens (verification/tokens.py). It runs each time, within seconds."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc.compiler.stages import StageReport
from llmc.errors import DeviceError
from llmc.runtime.executors import executor_class
from llmc.runtime.executors.generating import GeneratingExecutor
from llmc.runtime.startup.opening import EngineOptions, open_core, open_executor

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Manifest
    from llmc.artifacts.store.entries import Entry
    from llmc.compiler.stages import Stages
    from llmc.compiler.targets.base import Target
    from llmc.compiler.verification.limits import AccuracyLimits
    from llmc.runtime.bundle import Bundle


def gives_tokens(manifest: Manifest) -> bool:
    """Whether the manifest's device returns only tokens."""
    return issubclass(executor_class(manifest.executor), GeneratingExecutor)


def tokens_stage(
    bundle: Bundle, stages: Stages, target: Target, probes: Entry, limits: AccuracyLimits
) -> dict[str, Any]:
    """Verify the bundle, and return the manifest record without the mode. Raises VerificationError, and DeviceError
    without the device."""
    from llmc.compiler.verification.probes import load_probes
    from llmc.compiler.verification.tokens import verify_tokens

    stages.report(StageReport("verify", False, None))
    start = time.perf_counter()
    with np.load(stages.path(probes.outputs["probes"])) as arrays:
        loaded = load_probes(arrays)
    options = EngineOptions()
    try:
        executor = open_executor(bundle, options)
    except DeviceError as error:
        raise DeviceError(f"{error}; --verify none compiles without running anything") from error
    try:
        found = verify_tokens(open_core(bundle, executor, options), loaded, limits)
    finally:
        executor.close()
    stages.report(StageReport("verify", False, time.perf_counter() - start))
    return {"reference": target.description.reference.name, "limits": asdict(limits), **found.to_json()}
