"""Packs weights for ONNX Runtime's kernels into the plain weights file, for executables to share.

Every session repacks matrices into its kernels' layout, in private memory. Saved prepacked, all sessions map them from
one file. The layout belongs to an ONNX Runtime version and an instruction set, so both are in the key. The format is
the runtime's own external data entry `prepacked_N` = key|offset;length;checksum….

Block offsets (nbits.py) cost nothing in the packed form on x86. There the kernels undo the weights' zero point by
adding blocksum(x) · sumᵀ, where sum is −2^(bits − 1) · scale, and keep those sums after the packed weights (MLAS,
qnbitgemm.h: codes, then [N/16 rounded up, K/block, 16] float32, then scales). `pack_weights` checks these sums, then
adds the offsets to them. ONNX Runtime 1.32 refuses packed copies whose bytes differ from its own. There, and with
other layouts, graphs add the offsets. `folds_offsets` tests the runtime.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from llmc.artifacts.temporaries import temporary_folder
from llmc.compiler.targets.onnxruntime.onnx_model import load_model, set_placements
from llmc.compiler.weights.recipes import ALIGNMENT
from llmc.errors import CompileError

_CHUNK = 1 << 20
_LANES = 16
_QUANTIZED_ALIGNMENT = 64


def pack_weights(
    model: bytes,
    weights: Path,
    placements: Mapping[str, Mapping[str, Any]],
    folder: Path,
    folded: Mapping[str, str] | None = None,
) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Write a weights file with packed copies in `folder`, and return the location of each tensor and packed copy.

    `folded` maps matrices whose packed copies include offsets to the tensors with those offsets. Raises CompileError
    when ONNX Runtime cannot pack, or packs in a layout that offsets cannot be added to.
    """
    if weights.stat().st_dev == folder.stat().st_dev:
        (folder / "weights").hardlink_to(weights)
    else:
        shutil.copyfile(weights, folder / "weights")
    placed = folder / "placed.onnx"
    placed.write_bytes(set_placements(load_model(model), "weights", placements).SerializeToString())
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
    if folded:
        _fold(saved, packed, result, folded)
    return packed, result


def folds_offsets() -> bool:
    """Whether ONNX Runtime's packed layout supports added offsets here, and its results include them."""
    rows, blocks, block = 24, 4, 32
    matrix = _Matrix(rows, blocks * block, 4, block)
    quantized = np.arange(rows * blocks * block // 2, dtype=np.uint32).astype(np.uint8).reshape(rows, blocks, -1)
    scales = np.arange(1, rows * blocks + 1, dtype=np.float32).reshape(rows, blocks)
    node = helper.make_node(
        "MatMulNBits", ["x", "codes", "scales"], ["y"], domain="com.microsoft",
        K=matrix.width, N=rows, bits=4, block_size=block, accuracy_level=4,
    )  # fmt: skip
    tensors = [TensorProto(name="codes", data_type=TensorProto.UINT8), TensorProto(name="scales", data_type=1)]
    for tensor, shape in zip(tensors, (quantized.shape, scales.shape), strict=True):
        tensor.dims.extend(shape)
        tensor.data_location = TensorProto.EXTERNAL
    model = helper.make_model(
        helper.make_graph(
            [node], "probe", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, matrix.width])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, rows])], tensors,
        ),
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)], ir_version=10,
    )  # fmt: skip
    placements = {
        "codes": {"offset": 0, "length": quantized.nbytes}, "scales": {"offset": ALIGNMENT, "length": scales.nbytes},
        "offsets": {"offset": ALIGNMENT, "length": scales.nbytes},
    }  # fmt: skip
    with temporary_folder("packing") as folder:
        weights = folder / "plain"
        weights.write_bytes(quantized.tobytes().ljust(ALIGNMENT, b"\0") + scales.tobytes())
        try:
            file, placements = pack_weights(
                model.SerializeToString(), weights, placements, folder, {"codes": "offsets"}
            )
            got = _run(set_placements(model, file.name, placements), file.parent, matrix.width)
        except CompileError:
            return False
    values = np.stack([quantized & 15, quantized >> 4], -1).reshape(rows, blocks, -1).astype(np.float32) - 8
    wanted = ((values + 1) * scales[..., None]).sum((1, 2))
    return bool(np.allclose(got[0], wanted, rtol=1e-3, atol=1e-3 * np.abs(wanted).max()))


def _run(model: ModelProto, folder: Path, width: int) -> NDArray[np.float32]:
    """The results for inputs of 1."""
    from llmc.runtime.executors.onnxruntime.session import open_session

    try:
        session = open_session(
            model.SerializeToString(), session__model_external_initializers_file_folder_path=str(folder)
        )
        built: NDArray[np.float32] = session.run(None, {"x": np.ones((1, width), np.float32)})[0]
    except Exception as e:
        raise CompileError(f"ONNX Runtime does not run packed weights with offsets: {e}") from e
    return built


@dataclass(frozen=True)
class _Matrix:
    rows: int
    width: int
    bits: int
    block: int

    @property
    def blocks(self) -> int:
        return -(-self.width // self.block)

    def laid_out(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """[rows, blocks] in the order of the packed form."""
        padded = np.zeros((-(-self.rows // _LANES) * _LANES, self.blocks), np.float32)
        padded[: self.rows] = values
        return padded.reshape(-1, _LANES, self.blocks).transpose(0, 2, 1).copy()


def _fold(
    saved: ModelProto, file: Path, placements: Mapping[str, Mapping[str, Any]], folded: Mapping[str, str]
) -> None:
    for node in saved.graph.node:
        if node.op_type != "MatMulNBits" or node.input[1] not in folded:
            continue
        attrs = {a.name: a.i for a in node.attribute}
        matrix = _Matrix(attrs["N"], attrs["K"], attrs["bits"], attrs["block_size"])
        at = placements[node.input[1]]
        blobs = [b for key, entry in at.items() if key.startswith("prepacked") for b in str(entry).split("|")[1:]]
        size = matrix.rows * matrix.blocks * matrix.block * matrix.bits // 8
        start = -(-size // _QUANTIZED_ALIGNMENT) * _QUANTIZED_ALIGNMENT
        tensors = [_read(file, placements[name], matrix) for name in (node.input[2], folded[node.input[1]])]
        scales, offsets = map(matrix.laid_out, tensors)
        if len(blobs) != 1 or int(blobs[0].split(";")[1]) < start + scales.nbytes + tensors[0].nbytes:
            raise CompileError(f"ONNX Runtime's packed form of {node.input[1]} has no room for offsets")
        mapped = np.memmap(file, np.float32, "r+", int(blobs[0].split(";")[0]) + start, scales.shape)
        if not np.array_equal(mapped, np.float32(-(1 << (matrix.bits - 1))) * scales):
            raise CompileError(f"ONNX Runtime's packed form of {node.input[1]} is not laid out as this llmc knows it")
        mapped += offsets
        mapped.flush()


def _read(file: Path, at: Mapping[str, Any], matrix: _Matrix) -> NDArray[np.float32]:
    count = matrix.rows * matrix.blocks
    return np.fromfile(file, np.float32, count, offset=int(at["offset"])).reshape(matrix.rows, matrix.blocks)


def _save_packed(model: Path, folder: Path) -> Any:
    from llmc.runtime.executors.onnxruntime.session import open_session

    try:
        open_session(
            str(model),
            saved_as=str(folder / "saved.onnx"),
            session__optimized_model_external_initializers_file_name="saved.data",
            session__optimized_model_external_initializers_min_size_in_bytes="16",
            session__save_external_prepacked_constant_initializers="1",
        )
    except Exception as e:
        raise CompileError(f"ONNX Runtime cannot save packed weights: {e}") from e
    return load_model((folder / "saved.onnx").read_bytes())


def _move(entry: str, source: BinaryIO, out: BinaryIO) -> str:
    """Append the blobs of one prepacked entry to `out`, and return the entry with the new offsets."""
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
