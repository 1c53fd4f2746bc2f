"""A GGUF file: weights, config and tokenizer in one.

GGUF has rows of q and k projections in llama.cpp's order, this module returns transformers' order. llama.cpp rotates
neighbours (2i, 2i+1) of a head, transformers rotates (i, i + head_dim/2). So conversion to GGUF interleaves the two
halves of each head, for the projections in `Gguf.interleaved`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from llmc.compiler.architectures.shared.block_form import BlockForm
from llmc.compiler.checkpoint.base import (
    Checkpoint,
    FloatArray,
    QuantisedBlocks,
    either,
    require_finite,
    unknown_tensor,
)
from llmc.compiler.checkpoint.gguf_config import ROPE_FACTORS, Metadata, build_config, token_ids
from llmc.compiler.checkpoint.gguf_header import TensorInfo, read_header
from llmc.compiler.checkpoint.gguf_tokenizer import build_tokenizer_json
from llmc.compiler.checkpoint.gguf_types import BLOCK_TYPES

Scalar = TypeVar("Scalar", bound=np.generic)


def restore_row_order(rows: np.ndarray[Any, np.dtype[Scalar]], heads: int) -> np.ndarray[Any, np.dtype[Scalar]]:
    """Reorder rows [N, …] of a q or k projection from llama.cpp's order to transformers'."""
    half = rows.shape[0] // heads // 2
    return np.ascontiguousarray(rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2)).reshape(rows.shape)


def interleaved(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Reorder rows [N, …] of a q or k projection to llama.cpp's order: the two halves of each head interleaved."""
    half = rows.shape[0] // heads // 2
    return np.ascontiguousarray(rows.reshape(heads, 2, half, *rows.shape[1:]).swapaxes(1, 2)).reshape(rows.shape)


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
    """The block form of a matrix of one of BLOCK_TYPES; None for other types and for tensors that are not matrices."""
    return BLOCK_TYPES[info.type].form if info.type in BLOCK_TYPES and len(info.shape) == 2 else None


def unkept(info: TensorInfo) -> str | None:
    """The type of a quantized matrix whose blocks are not kept, else None."""
    return None if info.type in _FLOATS or info.type in BLOCK_TYPES or len(info.shape) != 2 else f"GGUF {info.type}"


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


def _rows(info: TensorInfo, raw: Bytes) -> Bytes:
    """[N, bytes per row]"""
    return raw.reshape(-1, raw.size // int(np.prod(info.shape[:-1])))


_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_END_TOKENS = ("eos", "eot", "eom")
_SKIPPED = frozenset({ROPE_FACTORS})


class GgufCheckpoint(Checkpoint):
    """A GGUF file. Opening reads the header only (0.02 s with a 49k vocabulary); `tensor` dequantizes on demand."""

    format = "gguf"

    def __init__(self, path: Path, name: str | None = None) -> None:
        self._header = read_header(path)
        self._meta = Metadata(self._header)
        super().__init__(path, name or self._meta.text("general.name", path.stem) or path.stem)
        self._gguf = self._meta.gguf
        self._config = build_config(self._header)
        self._tensors = self._by_transformers_name()

    def _by_transformers_name(self) -> dict[str, TensorInfo]:
        found: dict[str, TensorInfo] = {}
        for info in self._header.tensors.values():
            if info.name in _SKIPPED:
                continue
            name = self._gguf.transformers_name(info.name)
            if name is None:
                raise self._meta.error(
                    f"tensor {info.name} is unknown in architecture {self._meta.arch}; the file is damaged or the "
                    "model variant is not supported"
                )
            found[name] = info
            self._check_rows(name, info)
        return found

    def _check_rows(self, name: str, info: TensorInfo) -> None:
        heads = self._heads(name)
        if heads and info.shape[0] != heads * self._config["head_dim"]:
            raise self._meta.error(f"damaged: {info.name} has {info.shape[0]} rows, which are not {heads} heads")

    def _heads(self, name: str) -> int:
        """Number of heads whose rows a projection's weight or bias stacks, else 0."""
        if ".q_proj." in name:
            return int(self._config["num_attention_heads"])
        if ".k_proj." in name or ".v_proj." in name:
            return int(self._config["num_key_value_heads"])
        return 0

    def _permuted_heads(self, name: str) -> int:
        """Number of heads of a tensor whose rows llama.cpp reordered, else 0."""
        interleaved = any(f".{part}." in name for part in self._gguf.interleaved)
        return self._heads(name) if interleaved else 0

    @property
    def config(self) -> dict[str, Any]:
        """The configuration that gguf_config builds from the metadata."""
        return dict(self._config)

    def roles(self) -> dict[str, Path]:
        """The single file, under one role for any file name."""
        return {"gguf": self.path}

    def tensor_names(self) -> list[str]:
        """Translated names; includes `lm_head.weight` only if the file stores it."""
        return sorted(self._tensors)

    def _info(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise unknown_tensor(name, self.path, self.tensor_names())
        return self._tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """[rows, columns], the reverse of GGUF's own order."""
        return self._info(name).shape

    def tensor(self, name: str) -> FloatArray:
        """Dequantized, with q and k rows in transformers' order; F32 outside q and k is a view of the file."""
        info = self._info(name)
        values = require_finite(dequantise(info, self._header.raw(info)), name, self.path)
        heads = self._permuted_heads(name)
        return restore_row_order(values, heads) if heads else values

    def forget(self) -> None:
        """Release the file's pages."""
        self._header.file.forget()

    def stored_form(self, name: str) -> BlockForm | None:
        """The form of a matrix of one of BLOCK_TYPES (gguf_types), else None."""
        return block_form(self._info(name))

    def unkept(self, name: str) -> str | None:
        """The type of a matrix with a code book (IQ1 to IQ3) or ternary weights (TQ)."""
        return unkept(self._info(name))

    def quantised_blocks(self, name: str) -> QuantisedBlocks | None:
        """Blocks of a matrix of one of BLOCK_TYPES, rows in transformers' order; None for other types."""
        info = self._info(name)
        if self.stored_form(name) is None:
            return None
        blocks = split_blocks(info, self._header.raw(info))
        require_finite(blocks.scale, f"{name} (scales)", self.path)
        if blocks.minimum is not None:
            require_finite(blocks.minimum, f"{name} (minimums)", self.path)
        heads = self._permuted_heads(name)
        if not heads:
            return blocks
        return replace(
            blocks,
            q=restore_row_order(blocks.q, heads),
            scale=restore_row_order(blocks.scale, heads),
            minimum=None if blocks.minimum is None else restore_row_order(blocks.minimum, heads),
        )

    def tokenizer_json(self) -> bytes:
        """Built from the vocabulary by gguf_tokenizer (0.1 s for 49k tokens)."""
        return build_tokenizer_json(self._meta)

    def chat_template(self) -> str | None:
        """The metadata's tokenizer.chat_template, with its second one for requests with tools, if there is one."""
        template = self._meta.get("tokenizer.chat_template")
        tool_use = self._meta.get("tokenizer.chat_template.tool_use")
        if isinstance(tool_use, str):
            return either(tool_use, template if isinstance(template, str) else None)
        return template if isinstance(template, str) else None

    @cached_property
    def _tokens(self) -> list[str]:
        return self._meta.strings("tokenizer.ggml.tokens")

    def special_tokens(self) -> dict[str, str]:
        """Texts of the token ids in the metadata."""
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
