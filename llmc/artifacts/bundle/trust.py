"""What counts as native code, and the contract between the keyring and the ways into the store (remotes, archives).

Native code is what an executor of llmc would load as code. A manifest or entry cannot declare itself data: everything
that is not known to be data counts as code.

    a bundle is data   if its executor is one of DATA_EXECUTORS, none of its executables is native, and none of its
                       files is one of CODE_FILES; decided by its manifest, before any blob is moved
    an entry is data   if its kind is one of DATA_KINDS, or it has portable executables of one of DATA_TARGETS
    a blob is data     if it has no code header (`code_in`); checked for every blob of a result received as data

Executors declare what they load as code (`opens` in runtime/executors/base.py). Before loading it, they call
`BundleFiles.require_native`, which refuses a bundle judged as data. tests/test_native.py checks the lists here against
targets, stages and executors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from llmc.artifacts.bundle.kernel_sets import KERNEL_SETS, KERNELS
from llmc.artifacts.bundle.manifest import PORTABLE_NAME, STARTER_NAME, Manifest
from llmc.artifacts.digest import open_regular
from llmc.errors import ArtifactError

if TYPE_CHECKING:
    from llmc.artifacts.key import Key


RECIPES = "recipes.json"
"""A bundle's index of the files that Gaudi's compiler wrote (executors/hpu/recipes.py)."""

CODE_FILES = frozenset({KERNELS, *(s.file for s in KERNEL_SETS), STARTER_NAME, PORTABLE_NAME, RECIPES})
"""Files that make a bundle native: kernel libraries (earlier bundles have one, KERNELS) and a second bundle's manifest.

A bundle with a portable source was compiled on the target, and is therefore native.
"""

DATA_EXECUTORS = frozenset(
    {"fake", "hpu", "inductor", "neuron", "onnxruntime", "openvino", "openvino-encoder", "openvino-static", "torch"}
)
"""Executors that run no code of a bundle except what CODE_FILES, an executable's state or its header reveals."""

DATA_TARGETS = frozenset({"fake", "hpu", "inductor", "lpu", "neuron", "openvino"})
"""Targets whose portable executables are data."""

DATA_KINDS = frozenset({
    "calibrate", "config", "describe", "encoder", "layout", "lower", "mix", "pack", "reference", "sense", "tokenizer",
    "trace", "verify", "weights",
})  # fmt: skip
"""Kinds of entries whose outputs no executor loads as code. A "bundle" is judged by its manifest."""

HEAD_BYTES = 64
_BEGINNINGS = (
    (b"\x7fELF", "a shared library (ELF)"),
    (b"\xfe\xed\xfa\xce", "a shared library (Mach-O)"),
    (b"\xfe\xed\xfa\xcf", "a shared library (Mach-O)"),
    (b"\xce\xfa\xed\xfe", "a shared library (Mach-O)"),
    (b"\xcf\xfa\xed\xfe", "a shared library (Mach-O)"),
    (b"\xca\xfe\xba\xbe", "a shared library (Mach-O)"),
    (b"\xca\xfe\xba\xbf", "a shared library (Mach-O)"),
    (b"!<arch>\n", "a static library"),
    (b"BC\xc0\xde", "LLVM bitcode"),
    (b"\xde\xc0\x17\x0b", "LLVM bitcode"),
    (b"\0asm", "WebAssembly"),
    (b"\x50\xed\x55\xba", "GPU code (a CUDA fat binary)"),
    (b"\x03\x02\x23\x07", "GPU code (SPIR-V)"),
    (b"LLMCXLA", "XLA's machine code"),
    (b"LLMCNEF", "Neuron's code (NEFF)"),
    (b"LLMCAOT", "code that AOTInductor compiled"),
    (b"RR_UPCVO", "a model that OpenVINO compiled"),
    (b"LLMCOVD", "a model that OpenVINO compiled for a device"),
    *((version.to_bytes(8, "little") + (1024).to_bytes(8, "little"), "Neuron's code (NEFF)") for version in (1, 2)),
)


def code_in(head: bytes) -> str | None:
    """Name the type of code in a file that starts with `head` (HEAD_BYTES bytes); None for data."""
    found = next((what for beginning, what in _BEGINNINGS if head.startswith(beginning)), None)
    if found is None and head[:2] == b"MZ" and 0 < int.from_bytes(head[60:64], "little") < 1 << 16:
        return "a shared library (PE)"
    return found


def code_among(files: Iterable[Path]) -> str | None:
    """Name the type of code in the first file that is code; None if all files are data. Raises OSError."""
    for path in files:
        with open_regular(path) as file:
            if (found := code_in(file.read(HEAD_BYTES))) is not None:
                return found
    return None


def code_of_bundle(manifest: Manifest) -> str | None:
    """Describe what makes a bundle native, judged by its manifest only; None for data."""
    if manifest.executor not in DATA_EXECUTORS:
        return f"executables for {manifest.executor!r:.80}"
    native = next((item for item in manifest.executables if item.state != "portable"), None)
    if native is not None:
        return f"executable {native}"
    return next((f"the file {name}" for name in sorted(CODE_FILES) if name in manifest.files), None)


def code_of_entry(key: Key, meta: Mapping[str, Any]) -> str | None:
    """Describe what makes an entry native, judged by its key and build metadata; None for data."""
    states = {str(found["state"]) for found in (key.components, meta) if "state" in found}
    if states - {"portable"}:
        return "native code"
    if key.kind in DATA_KINDS:
        return None
    portable = key.kind in ("executable", "slots") and states and key.components.get("target") in DATA_TARGETS
    return None if portable else f"output of stage {key.kind!r:.80}"


class UntrustedError(ArtifactError):
    """A signature is missing, wrong, or by an untrusted key; the message says which."""


class Trust(Protocol):
    """Decides which results may enter the store; implemented by `llmc.artifacts.signing.keyring.Keyring`."""

    def require(self, content: bytes, signature: bytes | None, *, native: bool, origin: str) -> str | None:
        """Return the id of the trusted key that signed `content`; None if it needs no signature and has no valid one.

        `content` is what was signed (a manifest's file, an entry's body), `signature` the content of a signature file,
        and `origin` the source of both, for messages. Native code needs a signature by a trusted key unless unsigned
        code is allowed. Raises UntrustedError.
        """


class TrustDecision:
    """The decision to accept a result; `signer` is the id of the trusted key that signed it, or None.

    A result accepted as data is examined again when its files have arrived, because their content was unknown before.
    """

    def __init__(self, trust: Trust, content: bytes, signature: bytes | None, *, native: bool, origin: str) -> None:
        """Decide by `trust`; the arguments are those of `Trust.require`. Raises UntrustedError."""
        self.signer = trust.require(content, signature, native=native, origin=origin)
        self._settled = native or self.signer is not None
        self._trust, self._content, self._signature, self._origin = trust, content, signature, origin

    def examine(self, files: Iterable[Path]) -> None:
        """Raise UntrustedError if the result was accepted as data and one of its files is code."""
        if self._settled:
            return
        try:
            found = code_among(files)
        except OSError as error:
            raise UntrustedError(f"{self._origin}: a received file cannot be read ({error.strerror})") from error
        if found is not None:
            origin = f"{self._origin} (holds {found})"
            self._trust.require(self._content, self._signature, native=True, origin=origin)
