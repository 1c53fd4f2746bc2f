"""A GGUF file, or the parts of a split one: weights, config and tokenizer in one.

GGUF has rows of some q and k projections in llama.cpp's order, this module returns transformers' order. llama.cpp
rotates neighbours (2i, 2i+1) of a head, transformers rotates (i, i + head_dim/2). So conversion to GGUF interleaves the
two halves of each head (`Gguf.interleaved`).

Most names follow from the gguf package's tables. Some tensors are split, or have another shape:

- Experts: gate and up are one tensor [E, 2 · N, K] in transformers, and two [E, N, K] in the file.
- Latent attention: kv_b_proj [H · (K + V), L] is [H, L, K] and [H, V, L] in the file.
- Recurrent layers: A is stored instead of log(-A), and vectors and convolutions have other shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from llmc.compiler.architectures.shared.block_form import BlockForm
from llmc.compiler.architectures.shared.gguf_form import Gguf
from llmc.compiler.checkpoint.base import (
    Checkpoint,
    FloatArray,
    QuantisedBlocks,
    either,
    require_finite,
    unknown_tensor,
)
from llmc.compiler.checkpoint.gguf_config import ROPE_TENSORS, Metadata, build_config, token_ids
from llmc.compiler.checkpoint.gguf_file import BLOCK_TYPES, TensorInfo, planes, read_header
from llmc.compiler.checkpoint.gguf_tokenizer import build_tokenizer_json
from llmc.compiler.checkpoint.quantised.floats import MXFP4_FORM, mxfp4_blocks

Combine = Callable[[Sequence[FloatArray]], FloatArray]
"""The file's tensors → transformers'."""


@dataclass(frozen=True)
class StoredParts:
    """A tensor's parts in the file. `combine` is None for one part as it is, or for the rows of several one after
    another."""

    parts: tuple[str, ...]
    combine: Combine | None = None
    turned: bool = False
    """Whether matrices [E, N, K] of the parts, row by row in turn, are [E, K, N] in transformers."""


def _in_turn(parts: Sequence[FloatArray]) -> FloatArray:
    rows = np.stack(parts, axis=2).reshape(parts[0].shape[0], -1, *parts[0].shape[2:])
    return rows.swapaxes(1, -1) if rows.ndim > 2 else rows


def _latent(parts: Sequence[FloatArray]) -> FloatArray:
    keys, values = parts
    rows = np.concatenate([keys.transpose(0, 2, 1), values], axis=1)
    return np.ascontiguousarray(rows.reshape(-1, rows.shape[2]))


def _one_row(parts: Sequence[FloatArray]) -> FloatArray:
    return parts[0].reshape(1, -1)


def _flat(parts: Sequence[FloatArray]) -> FloatArray:
    return parts[0].reshape(-1)


def _log_negative(parts: Sequence[FloatArray]) -> FloatArray:
    values = np.log(-parts[0])
    return values.reshape(-1) if values.shape[-1] == 1 else values


def _convolution(parts: Sequence[FloatArray]) -> FloatArray:
    return parts[0][:, None, :]


_BLOCK = re.compile(r"(?:\w+\.)*(?:layers|h|blocks|layer)\.(\d+)\.(.+)")
_TURNED = re.compile(r"mlp\.experts\.(gate_up|down)_proj(_bias)?")
_EXTRA: tuple[tuple[re.Pattern[str], tuple[str, ...], Combine | None], ...] = tuple(
    (re.compile(pattern), parts, combine)
    for pattern, parts, combine in (
        (r".*experts\.gate_up_proj", ("ffn_gate_exps.weight", "ffn_up_exps.weight"), None),
        (r".*experts\.gate_up_proj", ("ffn_gate_up_exps.weight",), None),
        (r".*experts\.(up|down)_proj", (r"ffn_\1_exps.weight",), None),
        (r"mlp\.gate\.moe_statics\.e_score_correction_bias", ("exp_probs_b.bias",), _one_row),
        (r"mlp\.gate\.e_score_correction_bias", ("exp_probs_b.bias",), None),
        (r"block_sparse_moe\.router\.weight", ("ffn_gate_inp.weight",), None),
        (r"shared_mlp\.input_linear\.weight", ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), None),
        (r"shared_mlp\.input_linear\.weight", ("ffn_gate.weight", "ffn_up.weight"), None),
        (r"shared_mlp\.output_linear\.weight", ("ffn_down.weight",), None),
        (r"self_attn\.kv_b_proj\.weight", ("attn_k_b.weight", "attn_v_b.weight"), _latent),
        (r"self_attn\.sinks", ("attn_sinks.weight",), None),
        (r"(?:mixer|mamba)\.A_log", ("ssm_a",), _log_negative),
        (r"(?:mixer|mamba)\.D", ("ssm_d",), _flat),
        (r"(?:mixer|mamba)\.dt_bias", ("ssm_dt.bias",), None),
        (r"(?:mixer|mamba)\.norm\.weight", ("ssm_norm.weight",), _flat),
        (r"(?:mixer|mamba)\.conv1d\.weight", ("ssm_conv1d.weight",), _convolution),
        (r"conv\.conv\.weight", ("shortconv.conv.weight",), _convolution),
    )
)
"""Parts of names within a layer → the file's, which the table lacks."""


def sources(gguf: Gguf, names: Collection[str], layers: int, stored: Container[str]) -> dict[str, StoredParts]:
    """transformers' names of a model's tensors → where the file has them; tensors that it lacks are left out."""
    found: dict[str, StoredParts] = {}
    for name in names:
        for source in _candidates(gguf, name, layers):
            if all(part in stored for part in source.parts):
                found[name] = source
                break
    return found


def _candidates(gguf: Gguf, name: str, layers: int) -> Iterator[StoredParts]:
    if block := _BLOCK.fullmatch(name):
        number, part = block.groups()
        if gguf.turned_experts and (match := _TURNED.fullmatch(part)):
            kinds, ending = match[1].split("_"), "bias" if match[2] else "weight"
            turned = tuple(f"blk.{number}.ffn_{kind}_exps.{ending}" for kind in kinds)
            yield StoredParts(turned, _in_turn, turned=not match[2])
            return
        for pattern, parts, combine in _EXTRA:
            if match := pattern.fullmatch(part):
                yield StoredParts(tuple(f"blk.{number}.{match.expand(one)}" for one in parts), combine)
    if known := _table(gguf.architecture, layers).get_name(name, try_suffixes=(".weight", ".bias")):
        yield StoredParts((known,))


@lru_cache(maxsize=4)
def _table(architecture: str, layers: int) -> Any:
    """gguf's table of an architecture, or Llama's for one that the package does not know."""
    import gguf

    known = (arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    arch = next(known, gguf.MODEL_ARCH.LLAMA)
    return gguf.get_tensor_name_map(arch, layers)


Scalar = TypeVar("Scalar", bound=np.generic)


def restore_row_order(rows: np.ndarray[Any, np.dtype[Scalar]], heads: int) -> np.ndarray[Any, np.dtype[Scalar]]:
    """Reorder rows [N, …] of a q or k projection from llama.cpp's order to transformers'."""
    half = rows.shape[0] // heads // 2
    return np.ascontiguousarray(rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2)).reshape(rows.shape)


Bytes = npt.NDArray[np.uint8]
_FLOATS = frozenset({"F32", "F16", "BF16"})


def dequantise(info: TensorInfo, raw: Bytes) -> FloatArray:
    """Float32 values in `info.shape`; a read-only view for F32. Damaged scales may give non-finite values."""
    if info.type == "F32":
        return raw.view("<f4").reshape(info.shape)
    if info.type == "F16":
        return raw.view("<f2").astype(np.float32).reshape(info.shape)
    if info.type == "BF16":
        return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(info.shape)
    with np.errstate(all="ignore"):
        if info.type in BLOCK_TYPES:
            return split_blocks(info, raw).dequantise().reshape(info.shape)
        import gguf

        values: Any = gguf.dequantize(_rows(info, raw), gguf.GGMLQuantizationType[info.type])
        return np.ascontiguousarray(values, dtype=np.float32).reshape(info.shape)


def block_form(info: TensorInfo) -> BlockForm | None:
    """The block form of matrices of one of BLOCK_TYPES; None for other types and for vectors."""
    return BLOCK_TYPES[info.type].form if info.type in BLOCK_TYPES and len(info.shape) in (2, 3) else None


def split_blocks(info: TensorInfo, raw: Bytes) -> QuantisedBlocks:
    """The blocks of a tensor of one of BLOCK_TYPES, stacked by rows. Damaged scales may be non-finite."""
    kind = BLOCK_TYPES[info.type]
    form, rows = kind.form, _rows(info, raw)
    with np.errstate(invalid="ignore"):
        q, scale, minimum = kind.split(rows.reshape(len(rows), info.shape[-1] // kind.stored, -1))
    return QuantisedBlocks(
        form.type,
        form.bits,
        kind.zero,
        q.reshape(len(rows), -1, form.block),
        scale.reshape(len(rows), -1),
        None if minimum is None else minimum.reshape(len(rows), -1),
    )


def _joined(parts: Sequence[QuantisedBlocks], shape: tuple[int, ...]) -> QuantisedBlocks:
    """Blocks of parts, of which the first has `shape`: of each stacked matrix, the rows of all parts in order."""
    matrices = shape[0] if len(shape) == 3 else 1
    whole = [replace(part, matrices=matrices) for part in parts]
    if len(whole) == 1:
        return whole[0]
    together = zip(*(part.apart() for part in whole), strict=True)
    return QuantisedBlocks.stacked([part for matrix in together for part in matrix], matrices)


def _rows_axis(shape: tuple[int, ...]) -> int:
    """The axis of the rows of matrices [N, K] or [E, N, K], or of a vector."""
    return max(len(shape) - 2, 0)


def _rows(info: TensorInfo, raw: Bytes) -> Bytes:
    """[N, bytes per row]"""
    return raw.reshape(-1, raw.size // int(np.prod(info.shape[:-1])))


_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_END_TOKENS = ("eos", "eot", "eom")


class GgufCheckpoint(Checkpoint):
    """A GGUF file. Opening reads the header only (0.02 s with a 49k vocabulary); `tensor` dequantizes on demand."""

    format = "gguf"

    def __init__(self, path: Path, name: str | None = None) -> None:
        self._header = read_header(path)
        self._meta = Metadata(self._header)
        super().__init__(path, name or self._meta.text("general.name", path.stem) or path.stem)
        self._gguf = self._meta.gguf
        self._config = build_config(self._meta)
        self._tensors = self._sources(sorted(self._meta.architecture.tensor_names(self._config)))
        for tensor in self._tensors:
            self._check_rows(tensor)

    def _sources(self, names: Collection[str]) -> dict[str, StoredParts]:
        """transformers' names → where the file has them. Raises CheckpointError for a tensor without a name."""
        tensors, layers = self._header.tensors, self._meta.layers
        found = sources(self._gguf, names, layers, tensors)
        if self._config.get("tie_word_embeddings") is True:
            found.pop(self._meta.architecture.names.lm_head, None)
        used = {part for source in found.values() for part in source.parts}
        for name in tensors.keys() - used - ROPE_TENSORS:
            block = re.match(r"blk\.(\d+)\.", name)
            if block is None or int(block[1]) < layers:
                raise self._meta.error(
                    f"tensor {name} is unknown in architecture {self._meta.arch}; the file is damaged or the "
                    "model variant is not supported"
                )
        return found

    def _check_rows(self, name: str) -> None:
        heads, width, rows = self._heads(name), self._config.get("head_dim"), self.shape(name)[0]
        if heads and (rows != heads * width if width else rows % (2 * heads)):
            stored = self._tensors[name].parts[0]
            raise self._meta.error(f"damaged: {stored} has {rows} rows, which are not {heads} heads")

    def _heads(self, name: str) -> int:
        """Number of heads whose rows a projection's weight or bias stacks, else 0."""
        if ".q_proj." in name:
            return int(self._config.get("num_attention_heads", 0))
        if ".k_proj." in name or ".v_proj." in name:
            return int(self._config.get("num_key_value_heads", 0))
        return 0

    def _permuted_heads(self, name: str) -> int:
        """Number of heads of a tensor whose rows llama.cpp reordered, else 0."""
        return self._heads(name) if self._gguf.interleaved and ".v_proj." not in name else 0

    @property
    def config(self) -> dict[str, Any]:
        return dict(self._config)

    def roles(self) -> dict[str, Path]:
        """The files by the number of their part, for any file name."""
        first, *others = (file.path for file in self._header.files)
        return {"gguf": first} | {f"gguf-{number:05}": path for number, path in enumerate(others, 2)}

    def tensor_names(self) -> list[str]:
        return sorted(self._tensors)

    def _source(self, name: str) -> tuple[StoredParts, list[TensorInfo]]:
        if name not in self._tensors:
            raise unknown_tensor(name, self.path, self.tensor_names())
        source = self._tensors[name]
        return source, [self._header.tensors[part] for part in source.parts]

    def shape(self, name: str) -> tuple[int, ...]:
        source, infos = self._source(name)
        if source.combine is not None:
            return source.combine([np.broadcast_to(np.float32(-1), info.shape) for info in infos]).shape
        axis, shape = _rows_axis(infos[0].shape), infos[0].shape
        return (*shape[:axis], sum(info.shape[axis] for info in infos), *shape[axis + 1 :])

    def tensor(self, name: str) -> FloatArray:
        """Dequantized, in transformers' order and shape. One F32 tensor of the file as it is, is a view of it."""
        source, infos = self._source(name)
        parts = [require_finite(dequantise(info, self._header.raw(info)), name, self.path) for info in infos]
        if source.combine is not None:
            return require_finite(np.ascontiguousarray(source.combine(parts)), name, self.path)
        values = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=_rows_axis(parts[0].shape))
        if self._gguf.norm_offset and name.endswith("norm.weight"):
            values = values - np.float32(self._gguf.norm_offset)
        return self._in_order(name, values)

    def _in_order(self, name: str, values: np.ndarray[Any, np.dtype[Scalar]]) -> np.ndarray[Any, np.dtype[Scalar]]:
        """`values`, [rows, …], with rows in transformers' order."""
        if heads := self._permuted_heads(name):
            return restore_row_order(values, heads)
        order = self._gguf.rows(self._config, name)
        return values if order is None else values[order]

    def forget(self) -> None:
        for file in self._header.files:
            file.forget()

    def stored_form(self, name: str) -> BlockForm | None:
        source, infos = self._source(name)
        forms = {block_form(info) for info in infos}
        return forms.pop() if source.combine is None and len(forms) == 1 else None

    def unkept(self, name: str) -> str | None:
        """The type of a matrix with a code book (IQ1 to IQ3) or ternary weights (TQ), or of parts that differ."""
        _, infos = self._source(name)
        if self.stored_form(name) is not None:
            return None
        quantized = [f"GGUF {info.type}" for info in infos if info.type not in _FLOATS and len(info.shape) > 1]
        return quantized[0] if quantized else None

    def quantised_blocks(self, name: str) -> QuantisedBlocks | None:
        """Blocks with rows in transformers' order; stacked matrices have their rows one after another."""
        _, infos = self._source(name)
        if self.stored_form(name) is None:
            return None
        blocks = _joined([split_blocks(info, self._header.raw(info)) for info in infos], infos[0].shape)
        require_finite(blocks.scale, f"{name} (scales)", self.path)
        if blocks.minimum is not None:
            require_finite(blocks.minimum, f"{name} (minimums)", self.path)
        return replace(
            blocks,
            q=self._in_order(name, blocks.q),
            scale=self._in_order(name, blocks.scale),
            minimum=None if blocks.minimum is None else self._in_order(name, blocks.minimum),
        )

    def reordered_form(self, name: str) -> BlockForm | None:
        """The form of experts in MXFP4 that transformers has transposed."""
        source, infos = self._source(name)
        return MXFP4_FORM if source.turned and all(info.type == "MXFP4" for info in infos) else None

    def reordered_blocks(self, name: str) -> QuantisedBlocks | None:
        if self.reordered_form(name) is None:
            return None
        _, infos = self._source(name)
        blocks = np.stack([self._header.raw(info).reshape(-1, info.shape[2] // 32, 17) for info in infos], axis=1)
        blocks = blocks.reshape(-1, *blocks.shape[2:])
        return mxfp4_blocks(planes(blocks[..., 1:], 16, 4), blocks[..., 0], infos[0].shape[0], name, self.path)

    def tokenizer_json(self) -> bytes:
        return build_tokenizer_json(self._meta)

    def chat_template(self) -> str | None:
        template = self._meta.get("tokenizer.chat_template")
        tool_use = self._meta.get("tokenizer.chat_template.tool_use")
        if isinstance(tool_use, str):
            return either(tool_use, template if isinstance(template, str) else None)
        return template if isinstance(template, str) else None

    @cached_property
    def _tokens(self) -> list[str]:
        return self._meta.strings("tokenizer.ggml.tokens")

    def special_tokens(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for role, short in _SPECIAL.items():
            index = self._meta.get(f"tokenizer.ggml.{short}_token_id")
            if type(index) is int and 0 <= index < len(self._tokens):
                found[role] = self._tokens[index]
        return found

    def generation_config(self) -> dict[str, Any]:
        """Ids from the metadata; `eos_token_ids`: end of sequence, of turn and of message."""
        ids = token_ids(self._meta)
        keys = [f"tokenizer.ggml.{short}_token_id" for short in _END_TOKENS]
        ends = [self._meta.integer(key, least=0) for key in keys if self._meta.get(key) is not None]
        return {
            "bos_token_id": ids["bos_token_id"],
            "eos_token_ids": list(dict.fromkeys(ends)),
            "pad_token_id": ids["pad_token_id"],
        }
