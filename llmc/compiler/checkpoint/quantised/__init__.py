"""Quantized Hugging Face folders, read by the method that `quantization_config` names.

A method is an entry of METHODS and a function (stated, stored): `stated` is the folder's `quantization_config`,
`stored` its tensors as they lie in files. It returns the model's tensors that these encode. Opening a folder checks
names, types and shapes from headers; values are checked when a tensor is read. Every error is a CheckpointError that
names the folder and the tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from llmc.compiler.checkpoint.base import FloatArray
from llmc.errors import CheckpointError

if TYPE_CHECKING:
    import numpy.typing as npt

    from llmc.compiler.architectures.shared.block_form import BlockForm
    from llmc.compiler.checkpoint.base import QuantisedBlocks
    from llmc.compiler.checkpoint.safetensors_file import SafetensorsFile


DTYPES = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""safetensors type of scales → the dtype that holds each of them (BlockForm.scales)."""

ACTIVATIONS = "quantization_config's settings of activations are ignored: they change no weight"
"""The notice of methods that also describe activations."""

_AGAIN = "fetch the checkpoint again"


class StoredTensors:
    """The tensors of a folder as they lie in its files, by their names there."""

    def __init__(self, path: Path, owner: Mapping[str, SafetensorsFile]) -> None:
        self.path = path
        self._owner = owner

    def __contains__(self, name: str) -> bool:
        return name in self._owner

    def names(self, end: str = "") -> list[str]:
        """Names that end with `end`, sorted."""
        return sorted(name for name in self._owner if name.endswith(end))

    def dtype(self, name: str) -> str:
        return self._owner[name].tensors[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._owner[name].tensors[name].shape

    def matrix(self, name: str) -> tuple[int, int]:
        """The stored shape of a matrix's quantized weights. Raises CheckpointError if it is not two-dimensional."""
        shape = self.shape(name)
        if len(shape) != 2 or 0 in shape:
            raise self.error(f"tensor {name} is {list(shape)}, not the shape of a stored matrix: fetch it again")
        return shape[0], shape[1]

    def quantized(self, name: str) -> npt.NDArray[Any]:
        """A read-only view of the file: integers, or the bytes of 8-bit floats."""
        return self._owner[name].quantized(name)

    def floats(self, name: str) -> FloatArray:
        return self._owner[name].tensor(name)

    def scales_of(self, name: str) -> str:
        """The dtype that holds each value of a tensor of scales."""
        return DTYPES[self.dtype(name)]

    def require(self, owner: str, name: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
        """Raise CheckpointError unless `name`, which `owner` needs, exists with one of these types and shapes."""
        if name not in self:
            raise self.error(f"{owner} has no {name}: {_AGAIN}")
        if self.dtype(name) not in dtypes:
            wanted = " or ".join(dtypes)
            raise self.error(
                f"tensor {name} has type {self.dtype(name)}, not {wanted} as its format requires: {_AGAIN}"
            )
        if shapes and self.shape(name) not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise self.error(
                f"tensor {name} is {list(self.shape(name))}, not {wanted} as {owner} and quantization_config say: "
                f"config.json is of another model, or the file is damaged; {_AGAIN}"
            )

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}")


class QuantisedTensor(ABC):
    """A quantized tensor of the model, encoded by the stored tensors `parts`. Methods are those of `Checkpoint`."""

    shape: tuple[int, ...]
    """Shape of the values, [out, in] for a matrix."""
    parts: tuple[str, ...]

    @abstractmethod
    def values(self) -> FloatArray:
        """The values in float32: finite, in `shape`. Raises CheckpointError."""

    def form(self) -> BlockForm | None:
        return None

    @abstractmethod
    def unkept(self) -> str | None:
        """The result of `Checkpoint.unkept`."""

    def blocks(self) -> QuantisedBlocks | None:
        return None

    def reordered_form(self) -> BlockForm | None:
        return None

    def reordered_blocks(self) -> QuantisedBlocks | None:
        return None


@dataclass(frozen=True)
class Reading:
    """A method's result for a folder: the model's tensors by name; stored tensors that are ignored because they change
    no weight; and a notice for people about each ignored part."""

    tensors: Mapping[str, QuantisedTensor]
    left_out: frozenset[str] = frozenset()
    notices: tuple[str, ...] = ()


Method: TypeAlias = Callable[[Mapping[str, Any], StoredTensors], Reading]


def stated_number(stated: Mapping[str, Any], name: str, stored: StoredTensors, allowed: tuple[int, ...]) -> int:
    """A number of quantization_config that is one of `allowed`. Raises CheckpointError."""
    value = stated.get(name)
    if type(value) is not int or value not in allowed:
        raise stored.error(
            f"quantization_config: {name} is {value!r:.60}; llmc reads {', '.join(map(str, allowed))}: {_AGAIN}"
        )
    return value


def stated_group(value: Any, stored: StoredTensors, width: int, owner: str) -> int:
    """Number of inputs that share a scale: the stated `group_size`, or `width` if that is -1. Raises CheckpointError if
    it is not a size, or does not divide `width`."""
    if type(value) is not int or (value < 1 and value != -1):
        raise stored.error(f"quantization_config: group_size is {value!r:.60}, not a number of inputs or -1: {_AGAIN}")
    group = width if value == -1 else value
    if not group or width % group:
        raise stored.error(f"{owner} has {width} inputs, which groups of {value} do not divide: {_AGAIN}")
    return group


STATED = "quantization_config"
METHODS = {
    "awq": "integers", "compressed-tensors": "compressed_tensors", "fp8": "floats", "gptq": "integers",
    "mxfp4": "floats",
}  # fmt: skip
"""`quant_method` → the module whose READERS has the function that reads it."""
_ANOTHER = "use the unquantized checkpoint, and let `llmc compile --quantize` quantize it"
_ADVICE = {
    "bitsandbytes": f"{_ANOTHER}; or write one on a machine with a GPU: `m = AutoModelForCausalLM.from_pretrained(…); "
    "m.dequantize().save_pretrained(…)` (transformers)",
}  # fmt: skip
"""Methods that are not read → advice for such a checkpoint, if it differs from _ANOTHER."""


def is_read(stated: Any) -> bool:
    """Whether the method of a quantization_config is supported."""
    return isinstance(stated, Mapping) and str(stated.get("quant_method")) in METHODS


def in_models_order(tensors: Mapping[str, QuantisedTensor], turned: frozenset[str]) -> Mapping[str, QuantisedTensor]:
    """The same tensors, transposed for modules whose weights are [in, out] (last name part in `turned`)."""
    from llmc.compiler.checkpoint.quantised.integers import GroupedTensor, TurnedTensor

    def of(name: str, tensor: QuantisedTensor) -> QuantisedTensor:
        last = name.removesuffix(".weight").rpartition(".")[2]
        return TurnedTensor(tensor) if last in turned and isinstance(tensor, GroupedTensor) else tensor

    return {name: of(name, tensor) for name, tensor in tensors.items()}


def read_quantised(config: Mapping[str, Any], stored: StoredTensors) -> Reading:
    """Read a folder's quantized tensors by config.json as stored; empty without a quantization_config. Raises
    CheckpointError; for an unknown method it lists the known ones."""
    text = config.get("text_config")
    stated = config.get(STATED) or (text.get(STATED) if isinstance(text, Mapping) else None)
    if not stated:
        return Reading({})
    if not is_read(stated):
        method = str(stated.get("quant_method") if isinstance(stated, Mapping) else stated)
        raise stored.error(
            f"quantization_config: quant_method {method!r:.60} is not supported; llmc reads "
            f"{', '.join(sorted(METHODS))}: {_ADVICE.get(method, _ANOTHER)}"
        )
    method = stated["quant_method"]
    module = import_module(f"llmc.compiler.checkpoint.quantised.{METHODS[method]}")
    read: Method = module.READERS[method]
    return read(stated, stored)
