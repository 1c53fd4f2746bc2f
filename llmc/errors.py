"""Every error that llmc raises on purpose.

LlmcError                  exit 1   anything below; the message says what, where and what to do
├── InputError             exit 2   a flag, argument, prompt or plan that cannot be used
│   └── UnknownNameError   exit 2   an unknown device, strategy, quantization…; lists the known ones
├── CheckpointError        exit 1   a checkpoint that is missing, damaged or of an unsupported architecture
├── CompileError           exit 1   lowering or compilation failed
├── DeviceError            exit 3   a device or toolchain is missing, or --require-native is unmet
├── VerificationError      exit 4   compiled graphs disagree with the reference model
├── ArtifactError          exit 5   a bundle or stored object is missing, damaged, incompatible or untrusted
├── CapacityError          exit 1   disk full or a quota reached; nothing was published
├── OutOfDeviceMemoryError exit 1   the device's memory is full; what it held before is unchanged
├── OverloadedError        exit 1   the engine's queue is full, or it is draining: try again later
└── EngineDeadError        exit 1   the engine stopped on an error; restart the server
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from llmc.shown import without_logins


class LlmcError(Exception):
    """Base class of all errors raised on purpose; `exit_code` is the exit status of the command line."""

    exit_code = 1

    def __str__(self) -> str:
        """The message, with users and passwords removed from URLs."""
        return without_logins(super().__str__())


class InputError(LlmcError):
    """A flag, argument, prompt or plan that cannot be used as given."""

    exit_code = 2


class UnknownNameError(InputError):
    """A name that no registry has; the message lists the known names and suggests the nearest.

    `others` maps other common terms to names in the registry.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], others: Mapping[str, str] | None = None) -> None:
        names = sorted(known)
        meant = did_you_mean(name, names, others)
        super().__init__(f"unknown {kind} {name!r}; known: {', '.join(names)}{meant}")


def did_you_mean(name: str, known: Iterable[str], others: Mapping[str, str] | None = None) -> str:
    """Message suffix that suggests the nearest of the `known` names, or "" if none is near. `others`: see
    UnknownNameError."""
    from difflib import get_close_matches

    called = {n.lower(): n for n in known} | dict(others or {})
    begun = [one for one in called if len(name) > 2 and one.startswith(f"{name.lower()}-")]
    near = begun if len(begun) == 1 else get_close_matches(name.lower(), called, n=1, cutoff=0.65)
    return f"; did you mean {called[near[0]]!r}?" if near else ""


class CheckpointError(LlmcError):
    """A checkpoint that is missing, damaged, or of an architecture llmc does not support."""


class NoTokenizerError(CheckpointError):
    """A checkpoint without a tokenizer that llmc can use; a bundle of it only accepts token ids."""


class CompileError(LlmcError):
    """Tracing, lowering or compiling a graph failed."""


class DeviceError(LlmcError):
    """A device or toolchain is missing, or `--require-native` cannot be met on this host."""

    exit_code = 3


class VerificationError(LlmcError):
    """A compiled graph disagrees with the reference model."""

    exit_code = 4


class ArtifactError(LlmcError):
    """A bundle or stored object is missing, damaged, incompatible with this host, or untrusted."""

    exit_code = 5


class CapacityError(LlmcError):
    """The disk is full or a quota is reached; nothing half-written was published."""


class OutOfDeviceMemoryError(LlmcError):
    """The device has no memory for the request; what it held before is unchanged."""


class OverloadedError(LlmcError):
    """The engine accepts no further request now; `retry_after_s` says when to retry, in seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDeadError(LlmcError):
    """The engine stopped on an error, and no request runs any more."""
