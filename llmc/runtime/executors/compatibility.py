"""Checks whether a bundle's executables fit this host: toolchain version, CPU instruction set, target device."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from llmc.artifacts.bundle.kernel_sets import best_set, sets_in
from llmc.artifacts.bundle.manifest import BUILT_FOR
from llmc.artifacts.log import logger
from llmc.errors import ArtifactError, DeviceError
from llmc.runtime.host import cpu_features, host_features

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from llmc.artifacts.bundle.kernel_sets import KernelSet
    from llmc.runtime.bundle import Bundle

_WITHOUT_KERNELS = ("--kernels", "onnxruntime")


def require_version(bundle: Bundle, package: str, here: str, called: str) -> None:
    """Raise ArtifactError unless version `here` of `package` compiled the bundle; messages use the name `called`."""
    built_with = bundle.manifest.toolchain.get(package)
    if built_with != here:
        raise ArtifactError(
            f"{bundle.path}: compiled with {called} {built_with}, this host has {here}; "
            f"install {package}=={built_with}, or compile again: {bundle.recompile_hint}"
        )


def kernels_here(bundle: Bundle) -> KernelSet:
    """The fastest of the bundle's kernels that this CPU runs; raises ArtifactError naming the missing features."""
    there, features = sets_in(bundle.manifest.files), cpu_features()
    found = best_set(features, [s.name for s in there])
    if found is not None:
        return found
    wanted = " or ".join(f"{s.name} (without {', '.join(sorted({*s.isa} - {*features}))} here)" for s in there)
    own = best_set(features)
    how = ["--cpu", ",".join([*(s.name for s in there), own.name])] if own else _WITHOUT_KERNELS
    raise ArtifactError(
        f"{bundle.path}: its kernels are for {wanted or 'no CPU that this llmc knows'}. Compile for this CPU, too: "
        f"{_recompile(bundle, how)}"
    )


def _recompile(bundle: Bundle, how: Sequence[str]) -> str:
    return bundle.recompile(bundle.manifest.device.partition(":")[0], *how)


def require_mappable(bundle: Bundle, library: Path) -> None:
    """Raise ArtifactError if the library's file system is mounted noexec, so its code cannot be mapped."""
    if hasattr(os, "statvfs") and os.statvfs(library).f_flag & os.ST_NOEXEC:
        raise ArtifactError(
            f"{bundle.path}: its kernels are a library, and {library} is on a file system that is mounted noexec; "
            f"copy the bundle to another one (cp -rL), mount this one with exec, or compile without kernels: "
            f"{_recompile(bundle, _WITHOUT_KERNELS)}"
        )


def require_features(bundle: Bundle, called: str) -> None:
    """Raise ArtifactError, naming the differences, for a bundle of another instruction set; `called` names it."""
    wanted, host = set(bundle.manifest.isa), set(host_features())
    if wanted != host:
        differs = [f"without {f}" for f in sorted(wanted - host)] + [f"with {f}" for f in sorted(host - wanted)]
        raise ArtifactError(
            f"{bundle.path}: compiled for another {called}; this host is {', '.join(differs)}. "
            f"Compile again here: {bundle.recompile_hint}"
        )


def require_built_here(bundle: Bundle, host: Mapping[str, str]) -> None:
    """Raise ArtifactError, naming the differences, for a bundle compiled on another target than `host` describes.

    `host` is `ExecutorDescription.host`'s result. Raises DeviceError if this host lacks the device.
    """
    wanted = bundle.manifest.options.get(BUILT_FOR)
    if wanted is None:
        return
    portable = "open its portable half on the CPU with LLMC_OPEN_PORTABLE=1"
    if not isinstance(wanted, dict) or not wanted or not all(isinstance(value, str) for value in wanted.values()):
        raise ArtifactError(
            f"{bundle.path}: its manifest does not say what its executables were compiled for; {portable}, or compile "
            f"it again on its device's host: llmc compile --resume -o {bundle.path}"
        )
    if not host:
        listed = ", ".join(f"{name} {value}" for name, value in sorted(wanted.items()))
        raise DeviceError(
            f"{bundle.path}: compiled for {listed}, and this host has no such device; run it there, or {portable}"
        )
    differs = [
        f"{name} {wanted.get(name, 'unknown')} (here: {host.get(name, 'none')})"
        for name in sorted({*wanted, *host}) if wanted.get(name) != host.get(name)
    ]  # fmt: skip
    if differs:
        raise ArtifactError(
            f"{bundle.path}: compiled for another {', '.join(differs)}; compile it again here: "
            f"llmc compile --resume -o {bundle.path}, or {portable}"
        )


def warn_in_place_of(bundle: Bundle, device: str) -> None:
    """Warn that the CPU runs a bundle compiled for `device`; no warning for ""."""
    if device:
        logger().warning(
            "%s: compiled for %s, and this host has no %s: it is opened on the CPU, so timings do not apply; "
            "for a CPU compile with --device cpu", bundle.path, bundle.manifest.device, device,
        )  # fmt: skip
