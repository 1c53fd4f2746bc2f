"""What the artifact store costs: hits, verification, putting, and a crowd of writers.

    python benchmarks/store.py [--work FOLDER] [-o store.json]

Every figure is the median of rounds in which what is measured and what it is compared with take turns. Files are made
in FOLDER, which should be on the disk that a store would be on; its page cache is warm.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

from llmc.artifacts.bundle.manifest import Manifest
from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.bundle.writer import write_bundle
from llmc.artifacts.digest import Blob
from llmc.artifacts.key import Key
from llmc.artifacts.store.store import Store
from llmc.artifacts.store.workspace import Workspace

EXECUTABLES = 100
EXECUTABLE_BYTES = 90_000
WEIGHTS_BYTES = 256 << 20
GIGABYTE = 1_000_000_000
WRITERS = 64
ROUNDS = 15


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def noise(seed: int, count: int) -> bytes:
    """`count` bytes that do not repeat within a megabyte."""
    piece = random.Random(seed).randbytes(1_000_003)
    return (piece * (count // len(piece) + 1))[:count]


def key(index: int) -> Key:
    return Key("executable", {"toolchain.x": "1", "shape.phase": "decode", "shape.batch": index})


def fill(store: Store, count: int) -> dict[str, Blob]:
    """`count` executables in the store, each under its key; the blobs by name."""
    chance = random.Random(1)
    found = {}
    for index in range(count):

        def build(space: Workspace) -> Mapping[str, Blob]:
            return {"executable": space.put_bytes(chance.randbytes(EXECUTABLE_BYTES))}

        found[str(index)] = store.get_or_build(key(index), build)[0].outputs["executable"]
    return found


def make_bundle(store: Store, blobs: dict[str, Blob], weights: Blob, folder: Path) -> None:
    executables = [
        {
            "phase": "decode", "batch": int(name), "query": 1, "context": 128, "state": "native", "blob": blob.digest,
            "buckets": 1, "key": key(int(name)).digest,
        }
        for name, blob in blobs.items()
    ]  # fmt: skip
    everything = {blob.digest: blob.size for blob in (*blobs.values(), weights)}
    manifest = Manifest.create(
        llmc="0", device="fake", target="fake", executor="fake", executables=executables,
        files={"weights.bin": weights.digest}, blobs=everything,
    )  # fmt: skip
    write_bundle(folder, manifest, {digest: store.path(Blob(digest, size)) for digest, size in everything.items()})


def map_file(path: Path) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        mapped[0]


def open_bundle(folder: Path) -> None:
    """Open a bundle as a server does: the manifest, then every blob, verified before it is mapped."""
    with BundleFiles.open(folder) as files:
        for digest in files.manifest.blobs:
            map_file(files.path(digest))


def look_up(root: Path) -> None:
    """Every executable as a compile asks for it: entry read and checked, blob verified."""
    store = Store(root)
    for index in range(EXECUTABLES):
        entry, hit = store.get_or_build(key(index), None)  # type: ignore[arg-type]
        assert hit
        map_file(store.path(entry.outputs["executable"]))


def hits(work: Path) -> dict[str, float]:
    """Milliseconds to open a bundle of 100 executables, and to look its keys up, beyond mapping the same files."""
    store = Store(work / "hits")
    blobs = fill(store, EXECUTABLES)
    with store.writer() as stream:
        stream.write(noise(2, WEIGHTS_BYTES))
    assert stream.blob is not None
    folder = work / "bundle"
    make_bundle(store, blobs, stream.blob, folder)
    paths = sorted((folder / "blobs" / "sha256").iterdir())
    executables = [store.path(blob) for blob in blobs.values()]
    time.sleep(0.1)  # files that changed a moment ago are not stamped
    open_bundle(folder)
    look_up(store.root)
    rows = [
        (
            seconds(lambda: open_bundle(folder)), seconds(lambda: [map_file(path) for path in paths]),
            seconds(lambda: look_up(store.root)), seconds(lambda: [map_file(path) for path in executables]),
        )
        for _ in range(ROUNDS)
    ]  # fmt: skip
    opened, mapped, looked, mapped_again = (1e3 * median(column) for column in zip(*rows, strict=True))
    return {
        "open_ms": opened, "map_ms": mapped, "open_beyond_mapping_ms": opened - mapped,
        "compile_hits_ms": looked, "compile_hits_beyond_mapping_ms": looked - mapped_again,
    }  # fmt: skip


def verification(work: Path) -> dict[str, float]:
    """GB/s of reading a store of 1 GB and comparing every digest, on one core; and of sha256 in memory."""
    store = Store(work / "verify")
    for part in range(4):
        store.put_bytes(noise(10 + part, GIGABYTE // 4))
    memory = bytes(GIGABYTE // 4)
    rows = [(seconds(store.verify), 4 * seconds(lambda: hashlib.sha256(memory).digest())) for _ in range(ROUNDS // 3)]
    ours, raw = (GIGABYTE / median(column) / 1e9 for column in zip(*rows, strict=True))
    return {"verify_gb_s": ours, "sha256_in_memory_gb_s": raw}


def copy(source: Path, dest: Path) -> None:
    with source.open("rb") as file, dest.open("wb") as out:
        shutil.copyfileobj(file, out, 1 << 20)
        out.flush()
        os.fsync(out.fileno())


def puts(work: Path) -> dict[str, float]:
    """Throughput of putting a file and bytes into a store, against a plain copy with fsync of the same file."""
    source = work / "source"
    data = noise(4, WEIGHTS_BYTES)
    source.write_bytes(data)
    rows = []
    for turn in range(ROUNDS):
        store = Store(work / f"put{turn}")
        other = Store(work / f"bytes{turn}")
        for used in (store, other):
            used.put_bytes(b"the folders are there")
        rows.append(
            (
                seconds(lambda: copy(source, work / "copy")), seconds(lambda: store.put_file(source)),  # noqa: B023
                seconds(lambda: other.put_bytes(data)),  # noqa: B023
            )
        )  # fmt: skip
        for used in (store, other):
            shutil.rmtree(used.root)
        (work / "copy").unlink()
    plain, file, memory = (median(column) for column in zip(*rows, strict=True))
    return {
        "copy_mb_s": WEIGHTS_BYTES / plain / 1e6,
        "put_file_ratio": median(a / b for a, b, _ in rows), "put_bytes_ratio": median(a / c for a, _, c in rows),
        "put_file_mb_s": WEIGHTS_BYTES / file / 1e6, "put_bytes_mb_s": WEIGHTS_BYTES / memory / 1e6,
    }  # fmt: skip


WRITER = """
import os, sys, time
from pathlib import Path
from llmc.artifacts.key import Key
from llmc.artifacts.store.store import Store
root, built = Path(sys.argv[1]), Path(sys.argv[2])
def build(space):
    (built / str(os.getpid())).touch()
    time.sleep(0.5)
    return {"a": space.put_bytes(b"a" * 100_000)}
print("ready", flush=True)
sys.stdin.read()
began = time.perf_counter()
entry, hit = Store(root).get_or_build(Key("k", {"a": 1}), build)
assert Store(root).get_bytes(entry.outputs["a"].digest) == b"a" * 100_000
"""


def writers(work: Path) -> dict[str, float]:
    """64 processes that want one key at once: how many compiled it (for half a second), and how long all took."""
    built = work / "built"
    built.mkdir()
    command = [sys.executable, "-c", WRITER, str(work / "writers"), str(built)]
    crowd = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(WRITERS)
    ]
    for process in crowd:
        assert process.stdout is not None
        process.stdout.readline()
    began = time.perf_counter()
    for process in crowd:
        assert process.stdin is not None
        process.stdin.close()
    failed = sum(process.wait() != 0 for process in crowd)
    took = time.perf_counter() - began
    return {"writers": WRITERS, "compiles": len(list(built.iterdir())), "failed": failed, "seconds": took}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="default: a temporary folder")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    result = {}
    with tempfile.TemporaryDirectory(dir=arguments.work, prefix="store-") as folder:
        for part in (hits, verification, puts, writers):
            result[part.__name__] = part(Path(folder))
            print(part.__name__, {name: round(value, 3) for name, value in result[part.__name__].items()}, flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
