"""Facts about a machine and its machine code, read from files without a server's packages."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from llmc.artifacts.third_party.base import Fact
from llmc.artifacts.third_party.contents import Tree
from llmc.cpus import CPUINFO, listed_features

NVIDIA = Path("/proc/driver/nvidia/gpus")
"""A folder for each GPU, with a file "information" (NVIDIA driver README, "Files in /proc")."""

_ELF_MACHINES = {62: "x86_64", 183: "aarch64"}
_NAMES = {"amd64": "x86_64", "arm64": "aarch64"}
LIBRARY = ".so"


def machine(tree: Tree) -> Iterator[Fact]:
    """Yield the fact "machine" of the shared libraries in a tree (ELF-64 header: e_machine at byte 18)."""
    for path in tree.files:
        if path.endswith(LIBRARY):
            head = tree.head(path, 20)
            known = _ELF_MACHINES.get(int.from_bytes(head[18:20], "little"))
            if head.startswith(b"\x7fELF") and known is not None:
                yield Fact("machine", known)


def machine_here() -> dict[str, str]:
    """Return the fact "machine" of this host."""
    name = platform.machine().lower()
    return {"machine": _NAMES.get(name, name)}


_SELECTING = ("amx", "asimd", "avx", "bf16", "bmi", "f16c", "fma", "sse4", "sve")
"""Beginnings of the features by which compilers select instructions."""


def native_cpu(file: Path = CPUINFO) -> dict[str, str]:
    """Return the fact "cpu": the features that compilers for this CPU use (-march=native), sorted; empty if unknown."""
    found = sorted(one for one in listed_features(file) if one.startswith(_SELECTING))
    return {"cpu": " ".join(found)} if found else {}


def nvidia_gpu(folder: Path = NVIDIA) -> dict[str, str]:
    """Return the fact "device.name" of this host's NVIDIA GPUs; empty without any, or where GPUs differ."""
    found = set()
    with suppress(OSError):
        for gpu in folder.iterdir():
            for line in (gpu / "information").read_text(errors="replace").splitlines():
                name, _, value = line.partition(":")
                if name.strip() == "Model":
                    found.add(value.strip())
    return {"device.name": found.pop()} if len(found) == 1 else {}
