"""neuronx-cc, the Neuron SDK's compiler: found on PATH, run as a process of its own, its log kept.

    neuronx-cc compile model.hlo_module.pb --framework=XLA --target=trn2 --output model.neff --logfile=… --lnc=2
               --model-type=transformer --auto-cast=none -O1

The arguments follow its callers: transformers-neuronx (compiler.py), zml (platforms/neuron), nkipy (core/compile.py)
and the folders of compile caches (command.txt); `--lnc` is for trn2 only ("only valid for Trn2 targets").
`--auto-cast=none`, because the plan's dtype was verified. It exits with 70 and a line "[ERROR] [NCC_…]" where it cannot
compile something. `neuronx-cc --version` prints the version.

CHIPS are those that it can compile for. Memory is per NeuronCore, or per logical core of several. Sources: AWS Neuron
documentation, "NeuronCores architecture" and "Logical NeuronCore configuration"; `neuronx-cc compile --help` 2.27 for
--lnc ("On Trn2, the default is 2").

--override-neuron-config has the supported members of NxD Inference's neuron_config; any other is refused by name:

    enable_bucketing             false: one prefill bucket of one whole prompt, and one decode bucket of all sequences
    on_device_sampling_config    {"global_topk": N}: how many of the largest logits are found on the device, 256 by
                                 default; null: none, all logits are copied to the host
    tp_degree                    as --tensor-parallel
    logical_nc_config            NeuronCores of a logical one, on trn2
    torch_dtype                  "bfloat16" or "float32", as --dtype

Sources: vLLM user guide for NxD Inference (Neuron SDK 2.23); neuronx-distributed-inference 11b342a, models/config.py
(NeuronConfig, OnDeviceSamplingConfig).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from llmc.artifacts.log import logger
from llmc.artifacts.temporaries import temporary_folder
from llmc.compiler.options import MAX_TOP_K, Option
from llmc.compiler.targets.workers import run_tool
from llmc.errors import CompileError, DeviceError, InputError, UnknownNameError
from llmc.strict_json import loads_object

NEURON_CONFIG: Option[str] = Option(
    "override_neuron_config", str, "",
    'Members of NxD Inference\'s neuron_config, as in {"enable_bucketing": false}.', metavar="JSON",
    shapes_executable=False,
)  # fmt: skip

_DTYPES = {"bfloat16": "bf16", "float32": "f32"}
_ELSEWHERE = {
    "batch_size": "--max-num-seqs", "max_batch_size": "--max-num-seqs", "seq_len": "--max-model-len",
    "max_context_length": "--max-prompt-len", "context_encoding_buckets": "--from-file",
    "token_generation_buckets": "--from-file", "quantized": "--quantize",
}  # fmt: skip
"""Members that are llmc flags."""


@dataclass(frozen=True)
class NeuronConfig:
    """The requested members; None for each one that is absent."""

    bucketing: bool = True
    top_k: int | None = None
    tensor_parallel: int | None = None
    lnc: int | None = None
    dtype: str | None = None

    @classmethod
    def parse(cls, text: str) -> NeuronConfig:
        """Parse the flag's text, "" for none. Raises InputError that names an unusable member."""
        if not text:
            return cls()
        try:
            found = loads_object(text.encode())
        except ValueError as e:
            raise _wrong(f"is not a JSON object ({e})") from e
        known = {"enable_bucketing", "on_device_sampling_config", "tp_degree", "logical_nc_config", "torch_dtype"}
        for name in found:
            if name in _ELSEWHERE:
                raise _wrong(f"{name} is {_ELSEWHERE[name]} here; give that")
            if name not in known:
                raise _wrong(f"{name} is not supported here; known: {', '.join(sorted(known))}")
        bucketing = found.get("enable_bucketing", True)
        if not isinstance(bucketing, bool):
            raise _wrong("enable_bucketing must be true or false")
        dtype = found.get("torch_dtype")
        if dtype is not None and dtype not in _DTYPES:
            raise _wrong(f"torch_dtype must be one of {', '.join(_DTYPES)}")
        return cls(
            bucketing, _top_k(found), _positive(found, "tp_degree"), _positive(found, "logical_nc_config"),
            None if dtype is None else _DTYPES[dtype],
        )  # fmt: skip


def canonical(text: str) -> str:
    """Normalise spaces and member order of a valid configuration."""
    return json.dumps(loads_object(text.encode()), sort_keys=True)


def _top_k(found: Mapping[str, Any]) -> int | None:
    if "on_device_sampling_config" not in found:
        return None
    requested = found["on_device_sampling_config"]
    if requested is None:
        return 0
    if not isinstance(requested, dict):
        raise _wrong("on_device_sampling_config must be an object, or null")
    number = requested.get("global_topk", MAX_TOP_K)
    if type(number) is not int or not 1 <= number <= MAX_TOP_K:
        raise _wrong(f"on_device_sampling_config.global_topk {json.dumps(number)} must be in 1 … {MAX_TOP_K}")
    return number


def _positive(found: Mapping[str, Any], name: str) -> int | None:
    value = found.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise _wrong(f"{name} must be a positive number")
    return value


def _wrong(what: str) -> InputError:
    return InputError(f"{NEURON_CONFIG.flag}: {what}")


GIB = 1 << 30


@dataclass(frozen=True)
class NeuronChip:
    """A chip: its name, and the bytes of a core by the number of NeuronCores in a logical one ("--lnc")."""

    name: str
    memory: Mapping[int, int]
    default_lnc: int = 1
    cores: int = 2
    """NeuronCores of a chip."""

    def lnc(self, requested: int | None) -> int:
        """Return the NeuronCores of a logical one. Raises InputError for a number that the chip does not offer."""
        if requested is None:
            return self.default_lnc
        if requested not in self.memory:
            raise InputError(
                f"logical_nc_config {requested} is not offered for {self.name}; offered: "
                f"{', '.join(map(str, self.memory))}"
            )
        return requested


CHIPS = {
    "trn1": NeuronChip("trn1", {1: 16 * GIB}),
    "inf2": NeuronChip("inf2", {1: 16 * GIB}),
    "trn2": NeuronChip("trn2", {1: 12 * GIB, 2: 24 * GIB}, 2, 8),
}
DEFAULT = "trn2"
"""The chip of `--device neuron` where NEURON_PLATFORM_TARGET_OVERRIDE names none."""


def chip_of(name: str) -> NeuronChip:
    """Look up a chip. Raises UnknownNameError listing the known ones."""
    if name not in CHIPS:
        raise UnknownNameError("Neuron target", name, CHIPS)
    return CHIPS[name]


TOOL = "neuronx-cc"
INSTALL = (
    "on x86-64 Linux, pip install neuronx-cc from AWS's Neuron repository (setup guide of the Neuron documentation), "
    "or take a Neuron image of AWS, and put it on PATH"
)
SECONDS = 7200
"""Default time limit of a run."""

OLDEST, NEWER = (2, 16), (3, 0)
"""The first version with trn2 and --lnc (Neuron SDK 2.21), and the first whose arguments are unknown."""

NEFF_HEADER = 1024
"""Bytes before a NEFF's archive; the file begins with its version and this number (uint64, little endian)."""

_VERSION = re.compile(r"NeuronX Compiler version ((\d+)\.(\d+)[\w.+]*)")
_ERROR = re.compile(r"^.*(?:\[ERROR\]|ERROR|NCC_[A-Z0-9]+|INTERNAL_ERROR).*$", re.MULTILINE)
_VERSION_SECONDS = 120


@dataclass(frozen=True)
class Compiler:
    """The compiler's path and version."""

    path: str
    version: str

    def compile(self, module: bytes, name: str, arguments: Sequence[str], seconds: float, logs: Path) -> bytes:
        """Compile a module to a NEFF; `name` is for people and for the log file in the folder `logs`.

        A failed run is repeated once, since a killed process may have run out of memory; one that exceeds `seconds` is
        not. Raises CompileError that names the log, which is kept.
        """
        slug = re.sub(r"\W+", "-", name).strip("-")
        for attempt in (1, 2):
            log = logs / f"{slug}.{os.getpid()}.{attempt}.log"
            try:
                neff = self._run(module, name, arguments, seconds, log)
            except _RunError as e:
                if attempt == 1 and e.again:
                    logger().warning("%s; trying once more (its log: %s)", e, log)
                    continue
                raise CompileError(f"{e}; its log: {log}") from None
            log.unlink(missing_ok=True)
            return neff
        raise AssertionError  # the second attempt returned or raised

    def _run(self, module: bytes, name: str, arguments: Sequence[str], seconds: float, log: Path) -> bytes:
        log.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder("neuron") as folder, log.open("wb") as out:
            given, output = Path(folder, "model.hlo_module.pb"), Path(folder, "model.neff")
            given.write_bytes(module)
            command = [
                self.path, "compile", str(given), "--framework=XLA", f"--output={output}",
                f"--logfile={folder}/log-neuron-cc.txt", *arguments,
            ]  # fmt: skip
            out.write(f"$ {' '.join(command)}\n".encode())
            out.flush()
            code = run_tool(command, folder, out.fileno(), seconds)
            with suppress(OSError):
                out.write(Path(folder, "log-neuron-cc.txt").read_bytes())
            out.flush()
            said = _last_error(log)
            if code is None:
                raise _RunError(
                    f"{TOOL} did not finish {name} within {seconds:g} seconds, and was stopped", again=False
                )
            if code < 0:
                raise _RunError(
                    f"{TOOL} was killed ({signal.Signals(-code).name}) while it compiled {name}, perhaps for lack of "
                    "memory: try fewer --jobs"
                )
            if code:
                raise _RunError(f"{TOOL} cannot compile {name} (exit code {code}){said}")
            try:
                neff = output.read_bytes()
            except OSError:
                raise _RunError(f"{TOOL} wrote no NEFF for {name}{said}") from None
            if not is_neff(neff):
                raise _RunError(f"the output of {TOOL} for {name} is not a NEFF ({len(neff)} bytes)")
            return neff


class _RunError(Exception):
    def __init__(self, what: str, again: bool = True) -> None:
        super().__init__(what)
        self.again = again


def find() -> Compiler | None:
    """Find the compiler on PATH; None if absent. Raises DeviceError if it does not run or has an unknown version."""
    path = shutil.which(TOOL)
    return None if path is None else _opened(path, Path(path).stat().st_mtime_ns)


def require() -> Compiler:
    """Return the compiler on PATH. Raises DeviceError with the install line."""
    found = find()
    if found is None:
        raise DeviceError(f"{TOOL} is not on PATH; {INSTALL}")
    return found


def arguments(chip: NeuronChip, lnc: int) -> tuple[str, ...]:
    """Return the arguments for a chip; `lnc`: NeuronCores of a logical one."""
    several = (f"--lnc={lnc}",) if len(chip.memory) > 1 else ()
    return (f"--target={chip.name}", *several, "--model-type=transformer", "--auto-cast=none", "-O1")


def is_neff(data: bytes | memoryview) -> bool:
    """Whether the data begins with a NEFF header and is longer than it."""
    return len(data) > NEFF_HEADER and int.from_bytes(data[8:16], "little") == NEFF_HEADER


@cache
def _opened(path: str, changed: int) -> Compiler:
    del changed  # part of the cache key: another file of that name is queried again
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, check=False, timeout=_VERSION_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise DeviceError(
            f"{path} --version did not end within {_VERSION_SECONDS} seconds; install it again: {INSTALL}"
        ) from None
    except OSError as e:
        raise DeviceError(f"{path} cannot be run ({e.strerror}); install it again: {INSTALL}") from e
    found = _VERSION.search(done.stdout + done.stderr)
    if found is None:
        raise DeviceError(
            f"{path} --version prints no version (exit code {done.returncode}); install it again: {INSTALL}"
        )
    if not OLDEST <= (int(found[2]), int(found[3])) < NEWER:
        raise DeviceError(
            f"{path} is version {found[1]}; llmc knows the arguments of 2.16 up to 2.x: install another neuronx-cc"
        )
    return Compiler(path, found[1])


def _last_error(log: Path) -> str:
    found = _ERROR.findall(log.read_text(errors="replace"))
    return f": {found[-1].strip():.300}" if found else ""
