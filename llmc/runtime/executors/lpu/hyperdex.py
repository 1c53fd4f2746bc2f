"""Finds HyperDex and runs it in a process (worker.py) with limits. HyperDex itself is not imported here.

The process may be killed, hang or fail; each case has its message. HyperDex needs its own Python and torch, and a
hanging device cannot be interrupted, so it never runs in this process. Its process group gets no Ctrl-C from the
terminal, because a signal during a transfer leaves the device in an error state (Hyper-Accel/docs,
docs/troubleshooting.md at 1924e4e).

The output of HyperDex's compiler in a bundle is a JSON file, and each of its files as a file of the bundle:

    executable = { "format": 1, "devices", "max_length",            LPUs, and tokens of a prompt with its continuation
                   "low_memory_usage", "fast_compile",              as AutoCompiler.compile takes them
                   "hyperdex": version,
                   "files": {path in the model's folder: name in the bundle} }
"""

from __future__ import annotations

import functools
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, NoReturn

from llmc.errors import ArtifactError, DeviceError, LlmcError
from llmc.paths import expanded
from llmc.runtime.executors.lpu import worker
from llmc.strict_json import loads_object

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle
    from llmc.settings import Settings

RESET = "run hyperdex-reset before the next try"
"""Clears a device that stopped during a transfer (troubleshooting.md, as above)."""

_CLOSE_S = 5.0
_LINE = 1 << 20

PACKAGE = "hyperdex-toolchain"
"""HyperDex's distribution name (Hyper-Accel/docs, docs/install_hyperdex.md at 0ad882a)."""

INSTALL = 'uv pip install -i "$HYPERACCEL_INDEX" vllm-orion==0.9.0+orion.toolchain151.fpga'
"""Install command from HyperAccel's vLLM guide, including HyperDex-Toolchain 1.5.1; "hybrid" instead of "fpga" is the
one with GPUs. HYPERACCEL_INDEX is HyperAccel's private package index with your credentials.
"""

_ASK = f"from importlib.metadata import version; print(version({PACKAGE!r}))"
_LIMIT_S = 60.0


@dataclass(frozen=True)
class HyperDexToolchain:
    """The Python that runs HyperDex, and HyperDex's version without its local part (the torch build, "+cu126")."""

    python: str
    version: str


def find_hyperdex(settings: Settings) -> HyperDexToolchain:
    """The HyperDex of LLMC_HYPERDEX_PYTHON, or of this Python. Raises DeviceError with the install command."""
    if settings.hyperdex_python is None:
        try:
            found = metadata.version(PACKAGE)
        except metadata.PackageNotFoundError:
            raise _missing("this environment") from None
        return HyperDexToolchain(sys.executable, _public(found))
    python = expanded(settings.hyperdex_python).absolute()
    try:
        changed = python.stat().st_mtime_ns
    except OSError as e:
        raise DeviceError(f"LLMC_HYPERDEX_PYTHON={python} cannot be run ({e.strerror}); name a Python") from None
    return HyperDexToolchain(str(python), _version_of(python, changed))


@functools.cache
def _version_of(python: Path, changed: int) -> str:
    """Cached for each Python by its modification time."""
    try:
        done = subprocess.run(
            [str(python), "-c", _ASK], capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, check=False
        )
    except OSError as e:
        raise DeviceError(f"LLMC_HYPERDEX_PYTHON={python} cannot be run ({e.strerror}); name a Python") from None
    except subprocess.TimeoutExpired:
        raise DeviceError(f"LLMC_HYPERDEX_PYTHON={python} did not answer within {_LIMIT_S:.0f} seconds") from None
    if done.returncode:
        raise _missing(str(python))
    return _public(done.stdout)


def _public(version: str) -> str:
    return version.strip().partition("+")[0]


def _missing(where: str) -> DeviceError:
    return DeviceError(
        f"HyperDex ({PACKAGE}) is not installed in {where}; with HyperAccel's credentials, in an environment with "
        f"Python 3.10 to 3.12: {INSTALL}; name that environment's Python in LLMC_HYPERDEX_PYTHON"
    )


class HyperDex:
    """HyperDex's process. Every failure raises a `failure` that names the log, which is kept.

    After a failure the process is gone, unless HyperDex itself reported the failure.
    """

    def __init__(self, toolchain: HyperDexToolchain, failure: type[LlmcError]) -> None:
        self._failure = failure
        handle, name = tempfile.mkstemp(prefix="llmc-hyperdex-", suffix=".log")
        self.log = Path(name)
        self._failed = False
        self._left = b""
        try:
            with os.fdopen(handle, "wb") as log:
                self._process = subprocess.Popen(
                    [toolchain.python, worker.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                    start_new_session=True,
                )  # fmt: skip
        except OSError as e:
            self.log.unlink()
            raise failure(f"{toolchain.python} cannot be run ({e.strerror}); see LLMC_HYPERDEX_PYTHON") from e

    def ask(self, do: str, seconds: float, **arguments: Any) -> dict[str, Any]:
        """Send a request and return the answer within `seconds`. `do` names the worker's method, also in messages."""
        line = json.dumps({"do": do, **arguments}).encode() + b"\n"
        try:
            pipe = self._pipe(self._process.stdin)
            pipe.write(line)
            pipe.flush()
        except (OSError, ValueError):
            self._ended(do)
        answer = self._answer(do, time.monotonic() + seconds, seconds)
        if "error" in answer:
            self._fail(f"HyperDex failed ({do}): {answer['error']}")
        return answer

    def _answer(self, do: str, end: float, seconds: float) -> dict[str, Any]:
        pipe = self._pipe(self._process.stdout)
        while b"\n" not in self._left:
            ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                self.kill()
                self._fail(f"HyperDex did not answer within {seconds:g} seconds ({do}) and was ended; {RESET}")
            found = os.read(pipe.fileno(), _LINE)
            if not found:
                self._ended(do)
            self._left += found
        line, _, self._left = self._left.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            self.kill()
            self._fail(f"HyperDex's process gave the invalid answer {line[:80]!r} ({do})")
        return answer

    def _ended(self, do: str) -> NoReturn:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)
        code = self._process.returncode
        self.kill()
        how = f"was killed by signal {-code} ({_signal(-code)})" if code is not None and code < 0 else "ended"
        code_text = "" if code is None or code < 0 else f" with exit status {code}"
        self._fail(f"HyperDex's process {how}{code_text} ({do}); {RESET}")

    def _fail(self, what: str) -> NoReturn:
        self._failed = True
        raise self._failure(f"{what}. Its log: {self.log}{self._last_line()}")

    def _last_line(self) -> str:
        with suppress(OSError):
            lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
            if lines:
                return f", which ends: {lines[-1]:.200}"
        return ""

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None
        return pipe

    def kill(self) -> None:
        """Kill the process and everything that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Let the process end within some seconds; its log is deleted unless it reports a failure."""
        with suppress(OSError):
            self._pipe(self._process.stdin).close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._pipe(self._process.stdout).close()
        if not self._failed:
            self.log.unlink(missing_ok=True)

    def __enter__(self) -> HyperDex:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            self.kill()
        self.close()


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


MODEL = Path("llmc/model")
"""A model's folder ends like a hub name (Hyper-Accel/docs, docs/model_compile.md at fab45db). It is always this name,
so that the compiler's output does not depend on the checkpoint's.
"""

FORMAT = 1
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}")
_KINDS: Mapping[str, type] = {
    "devices": int, "max_length": int, "low_memory_usage": bool, "fast_compile": bool, "hyperdex": str, "files": dict,
}  # fmt: skip


@dataclass(frozen=True)
class Artifact:
    """A parsed executable file; the module docstring has its grammar."""

    devices: int
    max_length: int
    low_memory_usage: bool
    fast_compile: bool
    hyperdex: str
    files: Mapping[str, str]

    def to_bytes(self) -> bytes:
        return json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True).encode()

    @classmethod
    def of(cls, bundle: Bundle) -> Artifact:
        return cls.parse(bundle.files.read(bundle.executable("any", None, None, None).blob), bundle)

    @classmethod
    def parse(cls, data: bytes, bundle: Bundle) -> Artifact:
        """Parse the artifact `data` of `bundle` and check that its paths stay within a folder. Raises ArtifactError."""

        def fail(problem: str) -> NoReturn:
            raise ArtifactError(f"{bundle.path}: its LPU artifact {problem}; compile again: {bundle.recompile_hint}")

        try:
            found: dict[str, Any] = loads_object(data)
        except ValueError as e:
            fail(f"is not JSON ({e})")
        if found.pop("format", None) != FORMAT:
            fail(f"is not of format {FORMAT}, which this llmc reads")
        if found.keys() != _KINDS.keys() or any(type(found[name]) is not kind for name, kind in _KINDS.items()):
            fail("lacks members of its format, or has others")
        if not is_power_of_two(found["devices"]) or found["max_length"] < 2:
            fail(f"says {found['devices']} devices and max_length {found['max_length']}")
        for path, name in found["files"].items():
            if not all(_PART.fullmatch(part) for part in path.split("/")) or not isinstance(name, str):
                fail(f"has a file at {path!r:.100}, which is not a relative path within a folder")
        return cls(**found)

    def lay_out(self, bundle: Bundle, folder: Path) -> None:
        """Link its verified files into `folder` under the paths that HyperDex expects. Raises ArtifactError."""
        for path, name in self.files.items():
            if name not in bundle.manifest.files:
                raise ArtifactError(
                    f"{bundle.path}: the file {name} of its LPU artifact is missing; compile again: "
                    f"{bundle.recompile_hint}"
                )
            index = folder / path
            index.parent.mkdir(parents=True, exist_ok=True)
            index.symlink_to(bundle.files.path(name).absolute())


def is_power_of_two(number: int) -> bool:
    """Whether HyperDex's compiler supports this number of LPUs (lpu_model_runner.py at a10068c)."""
    return number > 0 and number & (number - 1) == 0
