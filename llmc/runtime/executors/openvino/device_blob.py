"""A model that OpenVINO compiled for a GPU or an NPU, with the portable model that it was compiled from.

    file       the container of envelope.py, of form "LLMCOVD2"
    header     {"device": "GPU" | "NPU", "made_for": {name: value, …}}
    "ir"       OpenVINO's XML over the bundle's weights file, which any host opens on its CPU
    "native"   what `export_model` wrote, weights included

`made_for` are the facts of plugins.py that the native part depends on. A host whose device has others is refused.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass

import openvino as ov

from llmc.errors import ArtifactError
from llmc.runtime.executors.envelope import Envelope, Form, write_envelope
from llmc.runtime.executors.openvino.device import open_core, version
from llmc.runtime.executors.openvino.plugins import facts_here, kind_of, plugin_name

FORM = Form(b"LLMCOVD2", "a model compiled for a device")
IR, NATIVE = "ir", "native"
_KINDS = ("GPU", "NPU")


@dataclass(frozen=True)
class DeviceBlob:
    """See the module's docstring."""

    device: str
    made_for: Mapping[str, str]
    ir: bytes
    native: bytes

    def to_bytes(self) -> bytes:
        """The file; equal blobs give equal bytes."""
        header = {"device": self.device, "made_for": dict(self.made_for)}
        return write_envelope(header, {IR: self.ir, NATIVE: self.native}, FORM)

    @classmethod
    def parse(cls, data: bytes, source: str) -> DeviceBlob:
        """Take a file apart; raises ArtifactError that names `source` for anything else."""
        envelope = Envelope.parse(data, source, FORM)
        device, made_for = (envelope.header.get(name) for name in ("device", "made_for"))
        facts = [*made_for.values()] if isinstance(made_for, dict) else [None]
        if device not in _KINDS or not all(isinstance(value, str) for value in facts):
            raise ArtifactError(
                f"{source}: damaged, or not made by llmc: its header lacks device or made_for; compile it again with "
                "`llmc compile`"
            )
        return cls(str(device), dict(made_for or {}), bytes(envelope.section(IR)), bytes(envelope.section(NATIVE)))

    def open_on(self, device: str, source: str, again: str) -> ov.CompiledModel:
        """The native part on this host's device; nothing is compiled.

        Raises ArtifactError, naming `source`, what differs and the command `again`, for a device of another kind,
        platform or driver, and for what its plugin refuses.
        """
        here = facts_here(device)
        differs = [f"{name} {value}, here {here[name]}" for name, value in self.made_for.items()
                   if here.get(name, value) != value]  # fmt: skip
        if kind_of(device) != self.device or differs:
            what = "; ".join(differs) or f"a {self.device}, and opened on {device}"
            raise ArtifactError(f"{source}: compiled for another device ({what}); compile again here: {again}")
        try:
            return open_core().import_model(io.BytesIO(self.native), plugin_name(device), {})
        except RuntimeError as e:
            raise ArtifactError(
                f"{source}: OpenVINO {version()} cannot open it on {device}: {reason_of(e)}; compile again: {again}"
            ) from e


def reason_of(error: RuntimeError) -> str:
    """OpenVINO's own words, without the lines that name places in its source."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if line and not line.startswith("Exception from")]
    return " ".join(told)[:500] or "no reason given"
