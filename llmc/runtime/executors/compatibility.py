"""Whether a bundle's executables are for this host: its toolchain's version and the CPU's instruction set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.errors import ArtifactError
from llmc.runtime.host import KERNEL_FEATURES, cpu_features

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle


def require_version(bundle: Bundle, package: str, here: str, called: str) -> None:
    """Raise ArtifactError for a bundle that was not made with version `here` of `package` (its name in the message)."""
    made_with = bundle.manifest.toolchain.get(package)
    if made_with != here:
        raise ArtifactError(
            f"{bundle.path}: compiled with {called} {made_with}, this host has {here}; "
            f"install {package}=={made_with}, or compile again: {bundle.recompile_hint}"
        )


def require_kernel_features(bundle: Bundle) -> None:
    """Raise ArtifactError, naming what is missing, where this CPU lacks what the bundle's kernels need."""
    missing = sorted((set(bundle.manifest.isa) | set(KERNEL_FEATURES)) - set(cpu_features()))
    if missing:
        raise ArtifactError(
            f"{bundle.path}: its kernels need {', '.join(missing)}, which this CPU does not have. "
            f"Compile again here: {bundle.recompile_hint}"
        )


def require_features(bundle: Bundle, called: str) -> None:
    """Raise ArtifactError, saying what differs, for a bundle of another instruction set; `called`: what it is named."""
    wanted, host = set(bundle.manifest.isa), set(cpu_features())
    if wanted != host:
        differs = [f"without {f}" for f in sorted(wanted - host)] + [f"with {f}" for f in sorted(host - wanted)]
        raise ArtifactError(
            f"{bundle.path}: compiled for another {called}; this host is {', '.join(differs)}. "
            f"Compile again here: {bundle.recompile_hint}"
        )
