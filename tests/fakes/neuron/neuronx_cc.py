"""A fake of neuronx-cc 2.27: `python -m tests.fakes.neuronx_cc ARGUMENTS`, as the executable `neuronx-cc` runs it.

Its command line, messages and exit codes are those of the public sources that llmc/compiler/targets/neuron/ names:
`neuronx-cc --version` (aws-neuron documentation), "[ERROR] [NCC_EVRF…]" and exit code 70 (documentation of the
compiler's error codes), `--lnc` for trn2 alone, NEFF's header of 1,024 bytes. What it supports of XLA is what those
error codes leave. FAKE_NEURONX_CC makes it fail as the real one does:

    error     an internal error: a message, exit code 70
    hang      it never ends
    killed    by SIGKILL, as for want of memory
    once      killed, but only the first time for a module
    empty     exit code 0, and no NEFF
    old       it is version 2.9; "odd": it says no version

What comes out is an archive that the fake runtime (nrtpy/) replays on XLA's CPU, so that numbers are those of the
module that went in.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import signal
import sys
import tarfile
import time
from pathlib import Path
from typing import NoReturn

VERSION = "2.27.5334.0+f702b353"
TARGETS = ("inf2", "trn1", "trn1n", "trn2", "trn3")
CUSTOM_CALLS = ("AwsNeuronTopK", "AwsNeuronSilu", "AwsNeuronGelu", "AwsNeuronRmsNorm", "AwsNeuronSoftmax")
UNSUPPORTED = {
    "sort",
    "while",
    "conditional",
    "call",
    "triangular-solve",
    "infeed",
    "outfeed",
    "fft",
    "cholesky",
    "topk",
}
INT_MAX = 2**31 - 1


def main(argv: list[str]) -> None:
    mode = os.environ.get("FAKE_NEURONX_CC", "")
    if "--version" in argv:
        version = "2.9.1.0+aaaaaaaa" if mode == "old" else VERSION
        print(
            "no such thing" if mode == "odd" else f"NeuronX Compiler version {version}\n\nPython version 3.11",
            file=sys.stderr,
        )
        return
    requested = _arguments(argv)
    data = Path(requested.module).read_bytes()
    _fail_as_requested(mode, data)
    text = _checked(data, requested.target)
    neff = _neff(
        {"target": requested.target, "lnc": requested.lnc or (2 if requested.target == "trn2" else 1), "module": text}
    )
    if requested.logfile:
        Path(requested.logfile).write_text(f"NeuronX Compiler version {VERSION}\n")
    if mode != "empty":
        Path(requested.output).write_bytes(neff)
    print("Compiler status PASS")


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("neuronx-cc", allow_abbrev=False)
    parser.add_argument("command", choices=["compile"])
    parser.add_argument("module")
    parser.add_argument("--framework", choices=["XLA"], required=True)
    parser.add_argument("--target", choices=TARGETS, required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--logfile")
    parser.add_argument("--lnc", type=int, choices=[1, 2])
    parser.add_argument("--model-type", choices=["generic", "transformer", "unet-inference"])
    parser.add_argument("--auto-cast", choices=["none", "matmult", "all"])
    parser.add_argument("-O", "--optlevel", choices=["1", "2", "3"])
    requested = parser.parse_args(argv)
    if requested.lnc is not None and requested.target not in ("trn2", "trn3"):
        parser.error("--lnc is only valid for Trn2 targets")
    return requested


def _fail_as_requested(mode: str, data: bytes) -> None:
    if mode == "error":
        _error("NCC_INLA001", "An internal error occurred: Assertion failure in LowerActImpl")
    if mode == "hang":
        time.sleep(600)
    if mode == "once":
        mark = Path(os.environ["FAKE_NEURONX_CC_MARKS"], hashlib.sha256(data).hexdigest())
        mode = "" if mark.exists() else "killed"
        mark.touch()
    if mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


def _checked(data: bytes, target: str) -> str:
    """The module as text; ends the process for one that the compiler would refuse."""
    from jaxlib import _hlo

    try:
        module = _hlo.HloModule.from_serialized_hlo_module_proto(data)
    except Exception as e:  # noqa: BLE001 - jaxlib raises several
        _error("NCC_EHCA001", f"Failed to parse the HLO module: {e}")
    options = _hlo.HloPrintOptions()
    options.print_large_constants = True
    text = str(module.to_string(options))
    if any(number > INT_MAX for number in _ids(data)):
        _error("NCC_EHCA002", "an instruction's number is above INT_MAX")
    for shape in re.findall(r"\b(?:[suf]64|c64|c128)\[", text):
        _error("NCC_EVRF004", f"Data type {shape[:-1]} is not supported on the Neuron device")
    if "<=" in "".join(re.findall(r"\w\[[^\]]*\]", text)):
        _error("NCC_EVRF001", "dynamic dimensions are not supported")
    for operator in re.findall(r"^\s+(?:ROOT )?%?[\w.-]+ = (?:\([^)]*\)|\S+) ([a-z][\w-]*)\(", text, re.MULTILINE):
        if operator in UNSUPPORTED:
            code = "NCC_EVRF029" if operator == "sort" else "NCC_EVRF001"
            _error(code, f"Operation {operator} is not supported on {target}")
    for call in re.findall(r'custom_call_target="([^"]*)"', text):
        if call not in CUSTOM_CALLS:
            _error("NCC_EVRF015", f"custom call target {call} is not recognized")
    return text


def _ids(data: bytes) -> list[int]:
    from llmc.runtime.executors.xla import wire

    return [
        number
        for field, _, computation in wire.fields(data)
        if field == 3 and isinstance(computation, bytes)
        for within, _, instruction in wire.fields(computation)
        if within == 2 and isinstance(instruction, bytes)
        for inner, _, number in wire.fields(instruction)
        if inner == 35 and isinstance(number, int)
    ]


def _neff(content: dict[str, object]) -> bytes:
    """NEFF's header (version, its size, the size of what follows), and an archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        body = json.dumps(content).encode()
        info = tarfile.TarInfo("neff.json")
        info.size = len(body)
        archive.addfile(info, io.BytesIO(body))
    data = buffer.getvalue()
    header = b"".join(number.to_bytes(8, "little") for number in (2, 1024, len(data), 0, 5))
    return header.ljust(1024, b"\0") + data


def _error(code: str, message: str) -> NoReturn:
    print(f"2026-11-23T12:00:00Z 77 [ERROR] [{code}] {message}", file=sys.stderr)
    print("Diagnostic information: neuronx-cc 2.27, please open an issue", file=sys.stderr)
    sys.exit(70)


if __name__ == "__main__":
    main(sys.argv[1:])
