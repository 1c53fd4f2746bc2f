"""The contract of checkpoint formats, and mapped files.

A checkpoint is read-only: opening maps its files, `tensor` converts one tensor at a time, and nothing is cached. Names,
shapes and the config follow Hugging Face transformers 5 for every file format. Nothing here imports torch or
transformers. Every error is a CheckpointError that states the problem, the file, and the next step.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from llmc.compiler.architectures.shared.block_form import BlockForm
from llmc.compiler.architectures.shared.names import LM_HEADS
from llmc.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from llmc.compiler.architectures.shared.block_form import BlockForm


_POINTER = b"version https://git-lfs.github.com/spec/"


def require_content(path: Path, beginning: bytes) -> None:
    """Raise CheckpointError for a file that Git LFS has not fetched, by its first bytes."""
    if beginning.startswith(_POINTER):
        raise CheckpointError(f"{path}: a Git LFS pointer instead of the file; run `git lfs pull` in its folder")


class MappedFile:
    """A mapped file. The map lives as long as this object or any array made from `buffer`. Raises CheckpointError for a
    missing, unreadable or empty file, and for every read past the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as stream:
                self.size = stream.seek(0, 2)
                if self.size == 0:
                    raise CheckpointError(f"{path}: the file is empty (0 bytes); fetch it again")
                self.buffer = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: no such file") from error
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from error
        require_content(path, self.buffer[: len(_POINTER)])

    def forget(self) -> None:
        """Release the file's pages; the next read loads them again."""
        self.buffer.madvise(mmap.MADV_DONTNEED)

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}")

    def need(self, offset: int, size: int, what: str) -> None:
        """Raise CheckpointError unless `size` bytes exist at `offset`."""
        if size < 0 or offset + size > self.size:
            raise self.error(
                f"truncated or damaged: {what} at byte {offset} needs {size} bytes, but the file ends at "
                f"{self.size}; fetch it again"
            )

    def unpack(self, layout: struct.Struct, offset: int, what: str) -> tuple[int | float | bool, ...]:
        self.need(offset, layout.size, what)
        return layout.unpack_from(self.buffer, offset)

    def read(self, offset: int, size: int, what: str) -> bytes:
        self.need(offset, size, what)
        return self.buffer[offset : offset + size]


DIGEST_VERSION = 2
"""Bump when `Checkpoint.digest` covers something else: every key derived from it changes."""

_PATHS = ("_name_or_path",)
"""Config members that state where the config was saved, and change no result."""

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
FLOATS8 = "float8"
"""The answer of `Checkpoint.unkept` for float8 matrices; float16 holds them exactly, except for rounded scales."""

FloatArray: TypeAlias = "npt.NDArray[np.float32]"
HashFile = Callable[[Path], str]


@dataclass(frozen=True)
class QuantisedBlocks:
    """A weight matrix [N, K] as stored: `block` neighbours along K share a scale, and perhaps a zero point or a
    minimum.

    value[n, b*block + i] = scale[n, b] * (q[n, b, i] - zero_point) + (minimum[n, b] if there is one else 0)

    `dequantise` equals `Checkpoint.tensor` exactly (same float32 operations).
    """

    type: str
    """Name of the source format: "Q8_0", "Q4_1", "gptq"."""
    bits: int
    """4 or 8; narrower weights are held in 4."""
    zero_point: int | npt.NDArray[np.float32]
    """One for all blocks (128 for Q8_0, whose signed weights are held as unsigned; 8 for Q4_0; 0 for Q4_1), or whole
    numbers per block, [N, K/block]. With minimums, no weight is below it."""
    q: npt.NDArray[np.uint8]
    """[N, K/block, block], each value below 2**bits, one per byte."""
    scale: FloatArray
    """[N, K/block]"""
    minimum: FloatArray | None
    """[N, K/block], or None for formats without minimums."""
    matrices: int = 1
    """Number of matrices of equal height that are stacked by rows: a layer's experts."""

    @property
    def block(self) -> int:
        return int(self.q.shape[2])

    def cut(self, block: int) -> QuantisedBlocks:
        """The same matrix in smaller blocks; `block` must divide the current size."""
        import numpy as np

        rows, count, size = self.q.shape
        if block == size:
            return self
        times = size // block

        def each(values: FloatArray) -> FloatArray:
            return np.repeat(values, times, axis=1)

        return replace(
            self,
            q=self.q.reshape(rows, count * times, block),
            scale=each(self.scale),
            zero_point=self.zero_point if isinstance(self.zero_point, int) else each(self.zero_point),
            minimum=None if self.minimum is None else each(self.minimum),
        )

    def from_zero(self) -> QuantisedBlocks:
        """The same matrix with zero point 0 if blocks have minimums."""
        if self.minimum is None or not isinstance(self.zero_point, int) or not self.zero_point:
            return self
        return replace(self, q=self.q - self.zero_point, zero_point=0)

    @classmethod
    def stacked(cls, parts: Sequence[QuantisedBlocks], matrices: int) -> QuantisedBlocks:
        """Stack parts of one form [N, K] by rows, as `matrices` matrices. Differing zero points become per-block."""
        import numpy as np

        def zeros(part: QuantisedBlocks) -> FloatArray:
            return np.broadcast_to(np.float32(part.zero_point), part.scale.shape)

        first = parts[0]
        alike = all(isinstance(p.zero_point, int) and p.zero_point == first.zero_point for p in parts)
        minimums = [part.minimum for part in parts if part.minimum is not None]
        return replace(
            first,
            q=np.concatenate([part.q for part in parts]),
            scale=np.concatenate([part.scale for part in parts]),
            zero_point=first.zero_point if alike else np.concatenate([zeros(part) for part in parts]),
            minimum=np.concatenate(minimums) if minimums else None,
            matrices=matrices,
        )

    def apart(self) -> Iterator[QuantisedBlocks]:
        """Yield each of the stacked matrices."""
        rows = len(self.q) // self.matrices
        for at in (slice(i * rows, (i + 1) * rows) for i in range(self.matrices)):
            yield replace(
                self,
                q=self.q[at],
                scale=self.scale[at],
                zero_point=self.zero_point if isinstance(self.zero_point, int) else self.zero_point[at],
                minimum=None if self.minimum is None else self.minimum[at],
                matrices=1,
            )

    def dequantise(self) -> FloatArray:
        """Return the float32 matrix [N, K]."""
        import numpy as np

        quantized = self.q.astype(np.float32)
        quantized -= np.float32(self.zero_point) if isinstance(self.zero_point, int) else self.zero_point[..., None]
        quantized *= self.scale[..., None]
        if self.minimum is not None:
            quantized += self.minimum[..., None]
        return quantized.reshape(self.q.shape[0], -1)


@dataclass(frozen=True)
class AdapterFacts:
    """A selectable LoRA adapter as a bundle describes it: its name, its folder's name, its largest rank, and the last
    name parts of its modules."""

    name: str
    root: str
    rank: int
    modules: tuple[str, ...]


def folder_name(folder: Path) -> str:
    """The folder's name, or the hub name of a snapshot in the hub's cache (models--ORG--NAME/snapshots/COMMIT), whose
    own name is a commit hash."""
    real = folder.resolve()
    cached = real.parent.parent.name
    if real.parent.name == "snapshots" and cached.startswith("models--"):
        return cached.removeprefix("models--").replace("--", "/")
    return real.name


class Checkpoint(ABC):
    """An opened checkpoint. Threads may share it: all methods only read."""

    format: str
    """"huggingface", "gguf" or "config"; with suffix "+lora" for merged adapters, "+adapters" for selectable ones."""

    def __init__(self, path: Path, name: str) -> None:
        """Raises CheckpointError for a name that is not UTF-8, as bundles and keys require."""
        try:
            name.encode()
        except UnicodeEncodeError:
            raise CheckpointError(f"{name!a}: the checkpoint's name is not UTF-8; rename its folder") from None
        self.path = path
        self.name = name
        self.requested = str(path)
        """The name that was opened: a path, the demo model's name or a hub name."""
        self.left_out: Mapping[str, int] = {}
        """Modules outside the compiled text part → their number of tensors (shared/wrappers.py)."""
        self.choices: Sequence[AdapterFacts] = ()
        """The LoRA adapters that requests choose from (checkpoint/lora.py)."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {str(self.path)!r})"

    def of_adapter(self, number: int) -> Checkpoint:
        """The model that a request gets with adapter `number` of `choices`, counted from 1; 0 is the base model."""
        del number
        return self

    @property
    def notices(self) -> Sequence[str]:
        """One line for people about each ignored part that changes no weight, and each file that differs."""
        return ()

    @property
    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The configuration in transformers 5 terms (`rope_parameters`, …), for `AutoConfig.for_model(**config)`."""

    @abstractmethod
    def roles(self) -> dict[str, Path]:
        """The checkpoint's files by a role name that does not depend on their location."""

    def files(self) -> list[Path]:
        """Files whose content identifies the checkpoint, in the order of their roles."""
        return [path for _, path in sorted(self.roles().items())]

    def digest(self, hash_file: HashFile | None = None) -> str:
        """Return `"sha256:<hex>"` over the contents of weights, config and tokenizer; paths, times and hosts do not
        count.

        JSON files that are read as values count by value: the order of members does not matter. `hash_file` maps any
        other file to a string that stands for its content (default: `sha256_of`, which reads the whole file).
        """
        hash_one = hash_file or sha256_of
        total = hashlib.sha256(f"llmc checkpoint {DIGEST_VERSION} {self.format}\n".encode())
        for role, path in sorted(self.roles().items()):
            total.update(f"{role} {self._value_digest(role) or hash_one(path)}\n".encode())
        return f"sha256:{total.hexdigest()}"

    def _value_digest(self, role: str) -> str | None:
        """Digest of a file that is read as a JSON value; None for a file whose bytes count."""
        return None

    @abstractmethod
    def tensor_names(self) -> list[str]:
        """Tensor names as in transformers, e.g. `model.layers.0.self_attn.q_proj.weight`, sorted."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, [out, in] for a matrix; reads no data."""

    @abstractmethod
    def tensor(self, name: str) -> FloatArray:
        """The tensor as float32, C-contiguous, [out, in] for a matrix, every value finite.

        It may be a read-only view of the mapped file: copy it before writing to it (or before `torch.from_numpy`).
        Raises CheckpointError for an unknown name, a type without float32 values, or a NaN or infinity.
        """

    def fill(self, name: str, out: FloatArray) -> None:
        """Write the tensor into `out`, float32 of its shape and C-contiguous. Requires an earlier `tensor` call for it:
        values are not checked again. Raises CheckpointError for an unknown name."""
        out[...] = self.tensor(name)

    def forget(self) -> None:  # noqa: B027 - what maps no file has nothing to let go
        """Release the mapped pages; the next read loads them again."""

    def stored_form(self, name: str) -> BlockForm | None:
        """The form of the tensor's `quantised_blocks`, or None; reads no weights."""
        self.shape(name)
        return None

    def unkept(self, name: str) -> str | None:
        """The stored format, in a few words, of a quantized tensor that has no `quantised_blocks`; else None."""
        self.shape(name)
        return None

    def quantised_blocks(self, name: str) -> QuantisedBlocks | None:
        """The tensor's stored blocks, None where it has none. Raises CheckpointError for an unknown name."""
        self.shape(name)
        return None

    def reordered_form(self, name: str) -> BlockForm | None:
        """The form, with the order of inputs, of the tensor's `reordered_blocks`; None without them."""
        self.shape(name)
        return None

    def reordered_blocks(self, name: str) -> QuantisedBlocks | None:
        """Blocks with inputs in the order of `reordered_form`, for a tensor without blocks in its own order."""
        self.shape(name)
        return None

    @abstractmethod
    def tokenizer_json(self) -> bytes:
        """A Hugging Face tokenizer.json; always the same bytes. Raises NoTokenizerError if there is none,
        CheckpointError if it is damaged."""

    @abstractmethod
    def chat_template(self) -> str | None:
        """The jinja source of the (default) chat template, or None."""

    @abstractmethod
    def special_tokens(self) -> dict[str, str]:
        """Text of bos_token, eos_token, unk_token, pad_token, … if defined."""

    @abstractmethod
    def generation_config(self) -> dict[str, Any]:
        """Token ids: `bos_token_id` (int or None), `eos_token_ids` (list, may be empty), `pad_token_id`; and sampling
        defaults (temperature, top_p, top_k, repetition_penalty, …) that the checkpoint states."""


def either(tool_use: str, default: str | None) -> str:
    """One chat template: `tool_use` for requests with tools, and `default`, or `tool_use` again, for the others. The
    empty outputs keep jinja2 from removing a line break behind the added tags."""
    if default is None:
        return tool_use
    first, second = (f"{{{{ '' }}}}{text.removesuffix(chr(10))}{{{{ '' }}}}" for text in (tool_use, default))
    return f"{{% if tools %}}{first}{{% else %}}{second}{{% endif %}}"


def stored_name(name: str, names: Container[str]) -> str:
    """The name of the model's tensor `name` in a checkpoint with tensors `names`. A tied lm_head is stored as the
    embedding. Raises CheckpointError if the checkpoint lacks the tensor."""
    if name not in names and name in LM_HEADS:
        name = next((embedding for embedding in LM_HEADS[name] if embedding in names), LM_HEADS[name][0])
    if name not in names:
        raise CheckpointError(f"the checkpoint has no tensor {name!r}, which its architecture needs")
    return name


def stored_forms(checkpoint: Checkpoint) -> dict[str, BlockForm]:
    """Forms of all matrices that the checkpoint stores in blocks, by name. Reordered blocks have an order in their
    form. A tied lm_head is listed under its own name as well."""
    names, looked_up = checkpoint.tensor_names(), {name for embeddings in LM_HEADS.values() for name in embeddings}
    found: dict[str, BlockForm] = {}
    for name in names:
        form = checkpoint.stored_form(name)
        if form is None and name not in looked_up:
            form = checkpoint.reordered_form(name)
        if form is not None:
            found[name] = form
    for lm_head, embeddings in LM_HEADS.items():
        tied = next((found[embedding] for embedding in embeddings if embedding in found), None)
        if tied and lm_head not in names:
            found[lm_head] = tied
    return found


def coded_names(checkpoint: Checkpoint) -> list[str]:
    """Names of all quantized tensors, in blocks or not, sorted."""
    return [n for n in checkpoint.tensor_names() if checkpoint.stored_form(n) or checkpoint.unkept(n)]


def without_path(config: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON config without the members that state where it was saved."""
    return {name: value for name, value in config.items() if name not in _PATHS}


def sha256_of(path: Path) -> str:
    """`"sha256:<hex>"` of a file's content, about 1.5 GB/s. Raises CheckpointError if it cannot be read."""
    try:
        with path.open("rb") as stream:
            return f"sha256:{hashlib.file_digest(stream, 'sha256').hexdigest()}"
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error


def require_finite(array: FloatArray, name: str, path: Path) -> FloatArray:
    """Return `array` itself; raise CheckpointError for the first NaN or infinity. Copies nothing."""
    import numpy as np

    if array.size and not (np.isfinite(array.min()) and np.isfinite(array.max())):
        where = [int(i) for i in np.argwhere(~np.isfinite(array))[0]]
        raise CheckpointError(
            f"{path}: tensor {name} holds a non-finite value ({array[tuple(where)]} at {where}); "
            "the file is damaged or the model diverged in training: fetch the checkpoint again"
        )
    return array


def unknown_tensor(name: str, path: Path, known: list[str]) -> CheckpointError:
    """The error for a tensor name that the checkpoint does not have."""
    shown = ", ".join(known[:3]) or "none"
    return CheckpointError(f"{path}: no tensor named {name!r}; it has {len(known)}: {shown}, …")


class WrappedCheckpoint(Checkpoint):
    """A checkpoint that overrides parts of `inner`, and delegates everything else to it."""

    def __init__(self, inner: Checkpoint, name: str, form: str) -> None:
        super().__init__(inner.path, name)
        self.format = form
        self.requested = inner.requested
        self.left_out = inner.left_out
        self.choices = inner.choices
        self.inner = inner

    @property
    def notices(self) -> Sequence[str]:
        return self.inner.notices

    @property
    def config(self) -> dict[str, Any]:
        return self.inner.config

    def roles(self) -> dict[str, Path]:
        return self.inner.roles()

    def _value_digest(self, role: str) -> str | None:
        return self.inner._value_digest(role) if role in self.inner.roles() else None

    def tensor_names(self) -> list[str]:
        return self.inner.tensor_names()

    def as_stored(self, name: str) -> str | None:
        """The inner checkpoint's name of an unchanged tensor; None for a tensor that is built here."""
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        return self.inner.shape(name)

    def tensor(self, name: str) -> FloatArray:
        return self.inner.tensor(name)

    def fill(self, name: str, out: FloatArray) -> None:
        if (stored := self.as_stored(name)) is None:
            out[...] = self.tensor(name)
        else:
            self.inner.fill(stored, out)

    def forget(self) -> None:
        self.inner.forget()

    def stored_form(self, name: str) -> BlockForm | None:
        return None if (stored := self.as_stored(name)) is None else self.inner.stored_form(stored)

    def unkept(self, name: str) -> str | None:
        return None if (stored := self.as_stored(name)) is None else self.inner.unkept(stored)

    def quantised_blocks(self, name: str) -> QuantisedBlocks | None:
        return None if (stored := self.as_stored(name)) is None else self.inner.quantised_blocks(stored)

    def reordered_form(self, name: str) -> BlockForm | None:
        return None if (stored := self.as_stored(name)) is None else self.inner.reordered_form(stored)

    def reordered_blocks(self, name: str) -> QuantisedBlocks | None:
        return None if (stored := self.as_stored(name)) is None else self.inner.reordered_blocks(stored)

    def tokenizer_json(self) -> bytes:
        return self.inner.tokenizer_json()

    def chat_template(self) -> str | None:
        return self.inner.chat_template()

    def special_tokens(self) -> dict[str, str]:
        return self.inner.special_tokens()

    def generation_config(self) -> dict[str, Any]:
        return self.inner.generation_config()
