"""neuronx-cc, the Neuron SDK's compiler: found on PATH, run as a process of its own, its log kept.

    neuronx-cc compile model.hlo_module.pb --framework=XLA --target=trn2 --output model.neff --logfile=… --lnc=2
               --model-type=transformer --auto-cast=none -O1

The arguments follow its callers: transformers-neuronx (compiler.py), zml (platforms/neuron), nkipy (core/compile.py)
and the folders of compile caches (command.txt); `--lnc` is for trn2 only ("only valid for Trn2 targets").
`--auto-cast=none`, because the plan's dtype was verified. It exits with 70 and a line "[ERROR] [NCC_…]" where it cannot
compile something. `neuronx-cc --version` prints the version.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from llmc.artifacts.log import logger
from llmc.artifacts.temporaries import temporary_folder
from llmc.compiler.targets.neuron.chips import NeuronChip
from llmc.compiler.targets.workers import run_tool
from llmc.errors import CompileError, DeviceError

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

        A failed run is repeated once, since a killed process may have run out of memory; a run that exceeds `seconds`
        is not. Logs of failures are kept. Raises CompileError that names them.
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
    """Find the compiler on PATH; None if absent. Raises DeviceError for one that does not run or has an unknown
    version.
    """
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
