"""Where a device's executables ran, of record: what README.md, docs/devices.md and `llmc devices` say of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """A run on the device itself: on which `machine`, with which `toolchain`, when (`date`, "2026-11"), and where its
    figures are (`source`, a document). Without a machine nothing ran on it; `instead` says what was done."""

    machine: str = ""
    toolchain: str = ""
    date: str = ""
    source: str = ""
    instead: str = ""

    @property
    def ran(self) -> bool:
        """Whether executables ran on the device."""
        return bool(self.machine)

    def __str__(self) -> str:
        if self.ran:
            return f"yes: {self.machine}, {self.toolchain}"
        return f"no: {self.instead}" if self.instead else "no"


NEVER = Hardware()


def contract_tested(instead: str) -> Hardware:
    """Of a device that no machine of the project has: fakes of its toolchain stand for it, and `instead` was done."""
    return Hardware(instead=f"contract-tested, not run on hardware; {instead}")
