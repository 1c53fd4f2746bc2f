"""OpenVINO's compiled models, parsed, checked and imported: for the CPU plugin, and for a GPU or an NPU.

The CPU plugin exports a stream without weights. OpenVINO 2026.4 writes it as (src/plugins/intel_cpu, serialize.cpp;
inference, metadata):

    stream   = "RR_UPCVO" version:uint32 length:uint64 metadata body
    metadata = "meta=1.0;ov=" OpenVINO's version ";isa=" the instruction set that its kernels were chosen for
    body     = header custom constants model       positions in the header count from its first byte
    header   = custom_offset custom_size constants_offset constants_size model_offset model_size      uint64 each
    model    = the IR's XML, passed through CACHE_ENCRYPTION_CALLBACKS, which are the identity here

A constant of size 0 is in the file that WEIGHTS_PATH names at import, at its WeightlessCacheAttribute's offset. Blobs
therefore share one file, and neither they nor their keys contain its path.

A model for a GPU or an NPU is stored with the portable model that it was compiled from:

    file       the container of envelope.py, of form "LLMCOVD2"
    header     {"device": "GPU" | "NPU", "built_for": {name: value, …}}
    "ir"       OpenVINO's XML over the bundle's weights file, which any host opens on its CPU
    "native"   the output of `export_model`, including weights

`built_for` are the facts of device.py that the native part depends on. A host whose device has other facts is rejected.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openvino as ov

from llmc.errors import ArtifactError
from llmc.runtime.executors.envelope import ExecutableFile, Form, write_envelope
from llmc.runtime.executors.openvino.device import facts_here, kind_of, open_core, plugin_name, version

_MAGIC = b"RR_UPCVO"
_PREFIX = struct.Struct("<8sIQ")
_HEADER = struct.Struct("<6Q")
_FORMAT = 1
_LONGEST_METADATA = 1 << 16
_CURRENT = re.compile(r"current: .*;isa=([^;]*)")

UNCHANGED: Mapping[str, Any] = {"CACHE_ENCRYPTION_CALLBACKS": [bytes, bytes]}
"""The property with which a stream contains the model's XML as it is."""
FORM = Form(b"LLMCOVD2", "a model compiled for a device")
IR, NATIVE = "ir", "native"
_KINDS = ("GPU", "NPU")


@dataclass(frozen=True)
class CpuBlob:
    """The parts of the CPU plugin's stream."""

    metadata: str
    custom: bytes
    constants: memoryview
    model: bytes

    @classmethod
    def parse(cls, data: bytes) -> CpuBlob:
        """Parse a stream. Raises ValueError."""
        try:
            magic, number, length = _PREFIX.unpack_from(data)
            if magic != _MAGIC or number != _FORMAT or length > _LONGEST_METADATA:
                raise ValueError("it does not begin as OpenVINO's compiled models do")
            base = _PREFIX.size + length
            custom, custom_size, constants, constants_size, model, model_size = _HEADER.unpack_from(data, base)
        except struct.error as e:
            raise ValueError(f"it ends within its header ({e})") from e
        whole = memoryview(data)[base:]
        if not _HEADER.size <= custom <= custom + custom_size <= constants <= constants + constants_size <= model:
            raise ValueError("its parts overlap")
        if model + model_size != len(whole):
            raise ValueError(f"it has {len(whole)} bytes, and its header says {model + model_size}")
        return cls(
            data[_PREFIX.size : base].decode(errors="replace"), bytes(whole[custom : custom + custom_size]),
            whole[constants : constants + constants_size], bytes(whole[model : model + model_size]),
        )  # fmt: skip

    def with_model(self, model: bytes) -> bytes:
        """The stream with `model` in place of its own. It has one zero byte of constants, for empty ones."""
        at, empty = _HEADER.size + len(self.custom), b"\0"
        header = _HEADER.pack(_HEADER.size, len(self.custom), at, len(empty), at + len(empty), len(model))
        metadata = self.metadata.encode()
        return _PREFIX.pack(_MAGIC, _FORMAT, len(metadata)) + metadata + header + self.custom + empty + model

    @property
    def built_with(self) -> str:
        return self._stated("ov")

    @property
    def isa(self) -> str:
        """The instruction set, in OpenVINO's words."""
        return self._stated("isa")

    def _stated(self, name: str) -> str:
        fields = dict(part.split("=", 1) for part in self.metadata.split(";") if "=" in part)
        return fields.get(name, "")


def open_blob(data: bytes, weights: Path, properties: Mapping[str, Any], source: str, again: str) -> ov.CompiledModel:
    """Import a stream with constants in the file `weights`. Only primitives' code is compiled.

    Raises ArtifactError, naming `source`, the problem and the command `again` to recompile, for an invalid stream or
    one compiled by another OpenVINO or for another instruction set.
    """
    try:
        blob = CpuBlob.parse(data)
    except ValueError as e:
        raise ArtifactError(f"{source} is not a compiled OpenVINO model: {e}; compile again: {again}") from e
    if blob.built_with != version():
        raise ArtifactError(
            f"{source}: compiled with OpenVINO {blob.built_with or 'of an unknown version'}, this host has "
            f"{version()}; install openvino=={blob.built_with}, or compile again: {again}"
        )
    location = {"CACHE_MODE": "OPTIMIZE_SIZE", "WEIGHTS_PATH": str(weights.absolute())}
    try:
        return open_core().import_model(io.BytesIO(data), "CPU", {**properties, **location, **UNCHANGED})
    except RuntimeError as e:
        lines = [line.strip() for line in str(e).splitlines() if line.strip()]
        chosen = next((found[1] for line in lines if (found := _CURRENT.search(line))), blob.isa)
        if chosen != blob.isa:
            reason = f"it was compiled for {blob.isa or 'an unknown CPU'}, but OpenVINO chooses {chosen} on this one"
        else:
            reason = lines[-1] if lines else "no reason given"
        raise ArtifactError(
            f"{source}: OpenVINO {version()} cannot open it here: {reason}; compile again: {again}"
        ) from e


@dataclass(frozen=True)
class DeviceBlob:
    """A model that was compiled for a GPU or an NPU."""

    device: str
    built_for: Mapping[str, str]
    ir: bytes
    native: bytes

    def to_bytes(self) -> bytes:
        """The file; equal blobs give equal bytes."""
        header = {"device": self.device, "built_for": dict(self.built_for)}
        return write_envelope(header, {IR: self.ir, NATIVE: self.native}, FORM)

    @classmethod
    def parse(cls, data: bytes, source: str) -> DeviceBlob:
        """Parse a file. Raises ArtifactError naming `source`."""
        envelope = ExecutableFile.parse(data, source, FORM)
        device, built_for = (envelope.header.get(name) for name in ("device", "built_for"))
        facts = [*built_for.values()] if isinstance(built_for, dict) else [None]
        if device not in _KINDS or not all(isinstance(value, str) for value in facts):
            raise ArtifactError(
                f"{source}: damaged, or not made by llmc: its header lacks device or built_for; compile it again with "
                "`llmc compile`"
            )
        return cls(str(device), dict(built_for or {}), bytes(envelope.section(IR)), bytes(envelope.section(NATIVE)))

    def open_on(self, device: str, source: str, again: str) -> ov.CompiledModel:
        """Open the native part on this host's device. Nothing is compiled.

        Raises ArtifactError, naming `source`, the differences and the command `again`, for a device of another kind,
        platform or driver, and if its plugin rejects the model.
        """
        here = facts_here(device)
        differs = [f"{name} {value}, here {here[name]}" for name, value in self.built_for.items()
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
    """OpenVINO's own message, without source locations."""
    lines = [line.strip() for line in str(error).splitlines()]
    words = [line for line in lines if line and not line.startswith("Exception from")]
    return " ".join(words)[:500] or "no reason given"
