"""`llmc devices`: list the devices this host can compile for and run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from llmc.cli.options import Command, switch
from llmc.cli.output import echo, print_table


@dataclass(frozen=True, kw_only=True)
class DevicesCommand(Command):
    """List the devices: what this host can compile for and run, what is missing and how to install it.

    The table also names the hardware that each device was run on. Below it are the work left for a device's own host,
    and the TPU slices and NVIDIA GPUs that llmc knows.

    \b
    Example:
      llmc devices
      llmc devices --json
    """

    as_json: bool = switch("--json", "Print JSON.")

    def run(self) -> None:
        from llmc.compiler.pipeline.survey import host, survey

        found = survey()
        if self.as_json:
            echo(json.dumps(found))
            return
        echo(f"this host: {host()}")
        accelerators = [f"{text} ({row['device']})" for row in found for text in row["found"] if not _is_cpu(row)]
        echo(f"accelerators: {', '.join(accelerators) or 'none found'}\n")
        header = ("device", "compiles here", "runs here", "run on hardware")
        print_table(header, [(d["device"], _compiles(d), d["runs"], d["hardware"]["text"]) for d in found])
        for device in found:
            if device["note"]:
                echo(f"\n{device['device']}: left for the device's own host: {device['note']}")
        for device in found:
            if device["topologies"]:
                form = device["topology_form"]
                echo(f"\n--device {device['device']}:{form['written']}, for example {form['example']}")
                header = (form["row"], "memory a device", "devices a chip", form["column"])
                print_table(header, _generations(device["topologies"]))


def _is_cpu(row: dict[str, Any]) -> bool:
    from llmc.runtime.accelerators import CPU

    found: list[str] = row["found"]
    return found == [CPU.found()]


def _compiles(row: dict[str, Any]) -> str:
    return str(row["state"] if row["compiles"] == "yes" else row["compiles"])


def _generations(topologies: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for name, group in groupby(topologies, key=lambda t: t["generation"]):
        slices = list(group)
        first = slices[0]
        memory = f"{first['hbm_bytes_per_device'] / (1 << 30):.2f} GiB"
        yield name, memory, str(first["devices"] // first["chips"]), " ".join(t["shape"] for t in slices)
