"""The file of a Neuron executable: the container of envelope.py, with a header of its own kind.

    portable   "LLMCHLO1", section "hlo": the module, as data
    native     "LLMCNEF1", the same with "neff", or "neff.0", "neff.1", … where the ranks' differ: code

A header is StepHeader's, of platform "neuron"; `topology` is the chip ("trn2"). Its shapes are those over all ranks;
the module is one rank's. A native one says further `target`, `lnc` and `compiler`, which it was made for and by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmc.errors import ArtifactError
from llmc.runtime.executors.envelope import Envelope, Form, write_envelope
from llmc.runtime.executors.neuron.module import HloModule
from llmc.runtime.executors.xla.envelope import StepHeader, Tensor

HLO, NEFF = "hlo", "neff"
PORTABLE, NATIVE = Form(b"LLMCHLO1", "a Neuron program"), Form(b"LLMCNEF1", "a Neuron executable")


@dataclass(frozen=True)
class NeuronFile:
    """A file that was read and checked; `neffs` by rank, empty in a portable one."""

    header: StepHeader
    members: Mapping[str, Any]
    hlo: bytes
    module: HloModule
    neffs: tuple[memoryview, ...]

    @classmethod
    def parse(cls, data: bytes, source: str) -> NeuronFile:
        """Read a file of either form; raises ArtifactError. Nothing of it is run."""
        form = NATIVE if data.startswith(NATIVE.magic[:-1]) else PORTABLE
        envelope = Envelope.parse(data, source, form)
        header = StepHeader.parse(envelope.header, source)
        hlo = bytes(envelope.section(HLO))
        module = HloModule.parse(hlo, source)
        for what, tensors, found in (
            ("input", header.inputs, module.inputs),
            ("output", header.outputs, module.outputs),
        ):
            if [(t.dtype, share(t, header.devices)) for t in tensors] != list(found):
                raise ArtifactError(
                    f"{source}: damaged, or not made by llmc: an {what} of its module is not as its header says; "
                    "compile it again with `llmc compile`"
                )
        neffs = tuple(envelope.section(name) for name in sorted(envelope.names, key=_rank) if name != HLO)
        if form == NATIVE and len(neffs) not in (1, header.devices):
            raise ArtifactError(f"{source}: {len(neffs)} NEFFs for {header.devices} ranks; compile it again")
        return cls(header, envelope.header, hlo, module, neffs)


def write_portable(header: StepHeader, hlo: bytes) -> bytes:
    """The file of a module."""
    return write_envelope(header.to_json(), {HLO: hlo}, PORTABLE)


def write_native(file: NeuronFile, neffs: list[bytes], made: Mapping[str, Any]) -> bytes:
    """The file of a module and its NEFFs, one for all ranks or one for each; `made` says what for and by what."""
    names = [NEFF] if len(neffs) == 1 else [f"{NEFF}.{rank}" for rank in range(len(neffs))]
    return write_envelope(
        {**file.header.to_json(), **made}, {HLO: file.hlo, **dict(zip(names, neffs, strict=True))}, NATIVE
    )


def share(tensor: Tensor, devices: int) -> tuple[int, ...]:
    """The shape of one rank's part."""
    return tuple(n if dim is None else n // devices for n, dim in zip(tensor.shape, tensor.dims, strict=True))


def share_bytes(tensor: Tensor, devices: int) -> int:
    """Bytes of one rank's part."""
    return math.prod(share(tensor, devices)) * (2 if tensor.dtype == "bfloat16" else 4)


def _rank(name: str) -> int:
    return int(name.partition(".")[2] or 0) if name.startswith(NEFF) else -1
