"""Single operators of the kernels' library, run by ONNX Runtime."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from llmc.runtime.executors.onnxruntime.session import open_session

Arrays = dict[str, NDArray[Any]]
_TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "int64": TensorProto.INT64,
          "uint8": TensorProto.UINT8, "uint16": TensorProto.UINT16}  # fmt: skip
KINDS = {"k2": "float16", "v2": "float16", "k8": "uint8", "v8": "uint8", "k16": "uint16", "v16": "uint16",
         "words": "uint16"}  # fmt: skip
"""The types of outputs that are not float32, by name."""


class Runs(Protocol):
    """What runs operators in the place of ONNX Runtime."""

    def run(
        self, op: str, given: list[tuple[str, NDArray[Any] | None]], outputs: list[str], attrs: dict[str, Any]
    ) -> Arrays:
        """As the function of this name."""

    def team(self, threads: int) -> AbstractContextManager[None]:
        """Operators run on so many threads while it is entered."""


Library: TypeAlias = Path | Runs


def run(
    library: Library, op: str, given: list[tuple[str, NDArray[Any] | None]], outputs: list[str], **attrs: Any
) -> Arrays:
    """What an operator makes of inputs by name, None for one that is not there; `outputs` may begin with "-" for those
    that are not asked for."""
    if not isinstance(library, Path):
        return library.run(op, given, outputs, attrs)
    named = {name: array for name, array in given if array is not None}
    inputs = [name if array is not None else "" for name, array in given]
    types = [helper.make_tensor_value_info(n, _TYPES[str(a.dtype)], a.shape) for n, a in named.items()]
    wanted = [name for name in outputs if not name.startswith("-")]
    graph = helper.make_graph(
        [helper.make_node(op, inputs, outputs, domain="llmc", **attrs)], "single", types,
        [helper.make_tensor_value_info(name, _TYPES[KINDS.get(name, "float32")], None) for name in wanted],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("llmc", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    built = open_session(model, library=str(library)).run(wanted, named)
    return dict(zip(wanted, built, strict=True))


def quantised(x: NDArray[np.float32], group: int) -> NDArray[np.float32]:
    """Activations as the kernels see them: 8 bits in groups of the last axis."""
    pad = -x.shape[-1] % group
    groups = np.pad(x, ((0, 0), (0, pad))).reshape(len(x), -1, group)
    most = np.abs(groups).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0)
    values = np.rint(groups * inverse) * (most / np.float32(127))
    return values.reshape(len(x), -1)[:, : x.shape[-1]].astype(np.float32)
