"""The devices that this host can compile for and run on, found without importing any toolchain."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from llmc.compiler.targets import offered, open_target
from llmc.compiler.targets.base import Target
from llmc.cpus import usable_cpus
from llmc.platforms import exists_here, install_line
from llmc.runtime.accelerators import ACCELERATORS, CPU
from llmc.runtime.host import host_memory


def survey() -> list[dict[str, Any]]:
    """A row for each device, and for each kind of accelerator on this host that llmc does not support.

    Keys: compiles, runs ("yes" or what is missing), state of its executables here, a note (work left for the device's
    own host), the topologies that its name takes (`Topologies`) and their notation, found (accelerators on this host),
    hardware (where it ran, of record: `Hardware`, with its text), and its guide.
    """
    targets = list(_targets())
    rows = [_row(name, target) for name, target in targets]
    used = {kind.name for _, target in targets for kind in target.description.accelerators}
    return rows + [
        _unused(kind.name, found) for kind in ACCELERATORS if kind.name not in used and (found := kind.found())
    ]


def host() -> str:
    """This host's CPU model, CPU count and memory, for people."""
    memory = host_memory()
    sizes = [f"{usable_cpus()} CPUs", *([] if memory is None else [f"{memory / (1 << 30):.1f} GiB"])]
    return f"{CPU.found() or 'a CPU of unknown name'}; {', '.join(sizes)}"


def _targets() -> Iterator[tuple[str, Target]]:
    for name in offered():
        target = open_target(name)
        yield name, target
        for detail in target.description.listed:
            if detail:
                yield f"{name}:{detail}", open_target(f"{name}:{detail}")


def _row(name: str, target: Target) -> dict[str, Any]:
    device, needs = target.description, target.description.requirements
    missing, known = _missing(needs.compiling), device.topologies
    form = known and {name: getattr(known, name) for name in ("written", "example", "row", "column")}
    return {
        "device": name,
        "compiles": _lack(missing, needs.compile_extras, f" (missing {', '.join(missing)})") if missing else "yes",
        "runs": _runs(target),
        "state": target.state,
        "note": target.remaining(),
        "topologies": known.known() if known else [],
        "topology_form": form,
        "found": [found for accelerator in device.accelerators if (found := accelerator.found())],
        "hardware": {**asdict(device.hardware), "ran": device.hardware.ran, "text": str(device.hardware)},
        "guide": device.guide,
    }


def _unused(name: str, found: str) -> dict[str, Any]:
    no = "no: no device of llmc is for it"
    return {
        "device": name, "compiles": no, "runs": no, "state": "", "note": "", "topologies": [], "topology_form": None,
        "found": [found], "hardware": {"ran": False, "text": "no"}, "guide": "",
    }  # fmt: skip


def _runs(target: Target) -> str:
    needs = target.description.requirements
    if missing := _missing(needs.running):
        return _lack(missing, needs.run_extras, "")
    if lacks := target.lacks():
        return f"no: {lacks}"
    return "yes" if target.state == "native" else "on CPU, portable"


def _lack(missing: Sequence[str], extras: Sequence[str], why: str) -> str:
    absent = [package for package in missing if not exists_here(package)]
    return f"no: {absent[-1]} has no build for this platform" if absent else f"no: {install_line(*extras)}{why}"


def _missing(packages: Iterable[str]) -> list[str]:
    return [package for package in packages if find_spec(package) is None]
