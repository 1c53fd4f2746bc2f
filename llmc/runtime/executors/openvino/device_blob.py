"""A model that OpenVINO compiled for a GPU or an NPU, with the portable model that it was compiled from.

    file    = "LLMCOVD1" length header ir native
    length  = size of header in bytes, uint64, little endian, at most MAX_HEADER
    header  = canonical JSON {"device": "GPU" | "NPU", "ir": bytes of ir, "made_for": {name: value, …}}
    ir      = OpenVINO's XML over the bundle's weights file, which any host opens on its CPU
    native  = what `export_model` wrote, weights included, to the end of the file

`made_for` are the facts of plugins.py that the native part depends on. A host whose device has others is refused.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass

import openvino as ov

from llmc.artifacts.key import canonical_json
from llmc.errors import ArtifactError
from llmc.runtime.executors.openvino.device import open_core, version
from llmc.runtime.executors.openvino.plugins import facts_here, kind_of, plugin_name
from llmc.strict_json import loads_object

MAGIC = b"LLMCOVD1"
MAX_HEADER = 1 << 16
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
        header = canonical_json({"device": self.device, "ir": len(self.ir), "made_for": dict(self.made_for)})
        return MAGIC + len(header).to_bytes(8, "little") + header + self.ir + self.native

    @classmethod
    def parse(cls, data: bytes) -> DeviceBlob:
        """Take a file apart; raises ValueError for anything else."""
        if not data.startswith(MAGIC):
            raise ValueError("it does not begin as a model compiled for a device does")
        frame = len(MAGIC) + 8
        length = int.from_bytes(data[len(MAGIC) : frame], "little")
        if length > min(MAX_HEADER, len(data) - frame):
            raise ValueError("it ends within its header")
        begin = frame + length
        device, ir, made_for = _header(data[frame:begin])
        if not 0 < ir < len(data) - begin:
            raise ValueError(f"its portable model has {ir} bytes, and {len(data) - begin} are left of the file")
        return cls(device, made_for, data[begin : begin + ir], data[begin + ir :])

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


def _header(data: bytes) -> tuple[str, int, dict[str, str]]:
    try:
        members = loads_object(data)
    except ValueError as e:
        raise ValueError(f"its header is no JSON object ({e})") from e
    device, ir, made_for = (members.get(name) for name in ("device", "ir", "made_for"))
    if device not in _KINDS or type(ir) is not int or not isinstance(made_for, dict):
        raise ValueError("its header lacks device, ir or made_for")
    if not all(isinstance(value, str) for value in made_for.values()):
        raise ValueError("its header's made_for has something else than words")
    return str(device), ir, made_for
