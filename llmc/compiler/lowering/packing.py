"""Weights packed for ONNX Runtime's kernels, beside the plain ones in one file, for executables to share.

Every session repacks matrices into its kernels' layout, in private memory. Saved prepacked, they are mapped from one
file by all sessions instead: specialised bundles need that, a bundle with one executable does not. The layout belongs
to an ONNX Runtime version and an instruction set, so both are in the key. The format is the runtime's own external
data entry `prepacked_N` = key|offset;length;checksum….
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from onnx import TensorProto

from llmc.compiler.lowering.recipes import ALIGNMENT
from llmc.compiler.lowering.to_onnx import load_model, place
from llmc.errors import CompileError

_CHUNK = 1 << 20


def pack_weights(
    model: bytes, weights: Path, placements: Mapping[str, Mapping[str, Any]], folder: Path
) -> tuple[Path, dict[str, dict[str, Any]]]:
    """A weights file with packed copies, made in `folder`, and where each tensor and its packed copy lies.

    Raises CompileError when ONNX Runtime cannot pack.
    """
    (folder / "weights").hardlink_to(weights) if _same_device(weights, folder) else shutil.copyfile(
        weights, folder / "weights"
    )
    placed = folder / "placed.onnx"
    placed.write_bytes(place(load_model(model), "weights", placements).SerializeToString())
    saved = _save_packed(placed, folder)
    packed = folder / "packed"
    result: dict[str, dict[str, Any]] = {name: dict(at) for name, at in placements.items()}
    with weights.open("rb") as plain, packed.open("wb") as out, (folder / "saved.data").open("rb") as source:
        shutil.copyfileobj(plain, out, _CHUNK)
        for tensor in saved.graph.initializer:
            if tensor.data_location == TensorProto.EXTERNAL:
                for entry in tensor.external_data:
                    if entry.key.startswith("prepacked"):
                        result[tensor.name][entry.key] = _move(entry.value, source, out)
    return packed, result


def _same_device(a: Path, b: Path) -> bool:
    return a.stat().st_dev == b.stat().st_dev


def _save_packed(model: Path, folder: Path) -> Any:
    from llmc.runtime.executors.ort_session import open_session

    try:
        open_session(
            str(model),
            saved_as=str(folder / "saved.onnx"),
            session__optimized_model_external_initializers_file_name="saved.data",
            session__optimized_model_external_initializers_min_size_in_bytes="1024",
            session__save_external_prepacked_constant_initializers="1",
        )
    except Exception as e:
        raise CompileError(f"ONNX Runtime cannot save packed weights: {e}") from e
    return load_model((folder / "saved.onnx").read_bytes())


def _move(entry: str, source: BinaryIO, out: BinaryIO) -> str:
    """Copy the blobs of one prepacked entry to the end of `out`; returns the entry with the new offsets."""
    key, *blobs = entry.split("|")
    moved = [key]
    for blob in blobs:
        offset, length, *rest = blob.split(";")
        out.write(b"\0" * (-out.tell() % ALIGNMENT))
        at = out.tell()
        source.seek(int(offset))
        left = int(length)
        while left:
            chunk = source.read(min(left, _CHUNK))
            if not chunk:
                raise CompileError("ONNX Runtime saved fewer packed bytes than it lists")
            out.write(chunk)
            left -= len(chunk)
        moved.append(";".join([str(at), length, *rest]))
    return "|".join(moved)
