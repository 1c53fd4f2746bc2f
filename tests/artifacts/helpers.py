"""What several test modules share: small keys, children that are killed, and damage."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.bundle.manifest import Manifest
from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.bundle.writer import write_bundle
from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import Key

REPO = Path(__file__).parents[2]


def key(kind: str = "executable", **components: str | int | bool | None) -> Key:
    """A key; one of kind "executable" is of portable code, unless changed."""
    portable = {"target": "fake", "state": "portable"}
    return Key(kind, {"toolchain.onnxruntime": "1.31.1", "phase": "decode", "batch": 4, **portable, **components})


def child(script: str, *arguments: object, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Run `script` in a new Python process, in the repository."""
    command = [*before, sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], timeout: float = 60) -> str:
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err
    return out.strip()


def overwrite(path: Path, data: bytes) -> None:
    """Change a file in place, as a stray write would, whatever its mode."""
    path.chmod(0o644)
    path.write_bytes(data)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    overwrite(path, bytes(data))


def truncate(path: Path) -> None:
    overwrite(path, path.read_bytes()[:-1])


def files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


class Faults:
    """Makes system calls below one folder fail, as a full or broken disk would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._monkeypatch = monkeypatch
        self._folder = str(folder)

    def inject(self, call: str, code: int, *, after: int = 0) -> None:
        original = getattr(os, call)
        calls = 0

        def faulty(target: int | str | Path, *arguments: Any, **named: Any) -> object:
            nonlocal calls
            path = Path(f"/proc/self/fd/{target}").readlink() if isinstance(target, int) else target
            below = any(str(item).startswith(self._folder) for item in (path, *arguments))
            if below and (call != "open" or arguments[0] & os.O_CREAT):
                calls += 1
                if calls > after:
                    raise OSError(code, os.strerror(code))
            return original(target, *arguments, **named)

        self._monkeypatch.setattr(os, call, faulty)


def mounted(command: str) -> tuple[str, ...]:
    """A prefix that runs a program in a namespace of its own after `command`."""
    return ("unshare", "-Urm", "sh", "-c", f'{command}; exec "$@"', "sh")


CONTENT = {
    "weights": b"w" * 5000,
    "tokenizer": b'{"model": {}}',
    "prefill": b"graph of prefill" * 20,
    "decode": b"graph of decode" * 20,
}
DIGESTS = {name: digest_bytes(data) for name, data in CONTENT.items()}


def manifest(**changes: object) -> Manifest:
    """A small manifest over CONTENT."""
    executables = [
        {
            "phase": phase,
            "batch": 4,
            "query": None,
            "context": 2048,
            "state": "native",
            "blob": DIGESTS[phase],
            "buckets": 6,
            "key": digest_bytes(phase.encode()),
        }
        for phase in ("prefill", "decode")
    ]
    members: dict[str, object] = {
        "llmc": "0.1.0",
        "device": "cpu",
        "target": "onnxruntime",
        "executor": "onnxruntime",
        "model": {"name": "tiny", "layers": 2},
        "options": {"threads": 2, "ratio": 0.5},
        "plan": {"schema": 1, "decode": [[4, 1, size] for size in range(128, 2176, 128)]},
        "executables": executables,
        "files": {"tokenizer.json": DIGESTS["tokenizer"], "weights.bin": DIGESTS["weights"]},
        "blobs": {DIGESTS[name]: len(data) for name, data in CONTENT.items()},
        "toolchain": {"onnxruntime": "1.31.1"},
        "isa": ["avx2"],
        "summary": {"executables": 2},
    }
    return Manifest.create(**{**members, **changes})  # type: ignore[arg-type]


def sources(folder: Path, *, mode: int = 0o444) -> dict[str, Path]:
    """CONTENT as files, read-only like a store's blobs, by digest."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, data in CONTENT.items():
        path = folder / name
        if not path.exists():
            path.write_bytes(data)
            path.chmod(mode)
        found[DIGESTS[name]] = path
    return found


def bundle(folder: Path, signature: bytes | None = None, **changes: object) -> BundleFiles:
    """A bundle folder over CONTENT."""
    write_bundle(folder, manifest(**changes), sources(folder.parent / "model"), signature)
    return BundleFiles.open(folder)
