"""The devices that this host can compile for and run on, found without importing any toolchain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

from llmc.compiler.targets import open_target
from llmc.compiler.targets.base import Target
from llmc.compiler.targets.declared import devices
from llmc.platforms import exists_here


def survey() -> list[dict[str, Any]]:
    """A row for each device: compiles, runs ("yes" or what is missing), state of its executables here, a note, and the
    topologies that it takes behind its name (see `Target.topologies`), none for most."""
    rows = []
    for name in devices():
        target = open_target(name)
        if target.hidden:
            continue
        missing = _missing(target.compile_needs)
        rows.append(
            {
                "device": name,
                "compiles": _lack(missing, target.install, f" (missing {', '.join(missing)})") if missing else "yes",
                "runs": _runs(target),
                "state": target.state,
                "note": target.remaining(),
                "topologies": target.topologies(),
            }
        )
    return rows


def _runs(target: Target) -> str:
    if missing := _missing(target.run_needs):
        return _lack(missing, target.run_install, "")
    if lacks := target.lacks():
        return f"no: {lacks}"
    return "yes" if target.state == "native" else "on CPU, portable"


def _lack(missing: Sequence[str], install: str, why: str) -> str:
    absent = [package for package in missing if not exists_here(package)]
    return f"no: {absent[-1]} has no build for this platform" if absent else f"no: {install}{why}"


def _missing(packages: Iterable[str]) -> list[str]:
    return [package for package in packages if find_spec(package) is None]
