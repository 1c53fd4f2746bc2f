"""Matrix formats: the block family, bits, and block size of each matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from llmc.compiler.architectures.shared.block_form import BlockForm, common_block, common_order, forms_in_key
from llmc.compiler.checkpoint.adapter_layout import of_adapters
from llmc.compiler.targets.onnxruntime.options import F16, GROUP_SIZES, INT8

NORMED_BLOCK = 32
KEPT_BLOCK = 64
ZEROS = 2
"""The operator attribute for blocks with zero points next to their scales; 1 means offsets, 0 neither."""
FOLDED_BLOCK = 32
"""The smallest block whose offsets are folded: smaller blocks (K-quants among others) were not seen packed with
AVX-512.
"""

TABLES = ("", "iq4", "float4")
"""Value tables by their number in llmc's operators (kernels/source/panels.h)."""
_FEWER, _FEWER_BLOCK = 6, 16


@dataclass(frozen=True)
class MatrixFormat:
    """The format of a matrix in blocks.

    family       of its recipe (nbits.py, recipes.py)
    offsets      whether blocks have an offset
    zeros        whether all offsets are whole zero points
    order        the order in which its inputs are read, () for their own
    table        the table that quantized weights index (BlockForm.table)
    reordered    whether blocks are the sources' reordered ones
    """

    family: str
    bits: int
    block: int
    offsets: bool = False
    zeros: bool = False
    order: tuple[int, ...] = ()
    table: str = ""
    reordered: bool = False

    @property
    def beside(self) -> int:
        return ZEROS if self.zeros else int(self.offsets)


@dataclass(frozen=True)
class OnnxOptions:
    """The formats of a lowered model's matrices.

        activations   whether matmuls quantize activations, in the weights' blocks; llmc's kernels always do
        block         the most inputs that share a scale; 0 keeps float32
        bits          8 or 4, for matrices that are not kept; lm_head, embedding and adapters have `lm_head_bits`,
                      matrices of `wide` tensors 8
        stored        names of tensors whose own blocks are kept, each with its form; blocks larger than KEPT_BLOCK are
                      split, which changes no value
        fold          whether packed matrices include offsets (packing.py); otherwise graphs add blocksum(x) · offsetsᵀ
        panels        whether matrices use the layout of llmc's kernels (onnxruntime/kernels), which add offsets
        rolls         whether caches of layers with a window begin at a later token, given by an input
        cache         KV cache precision of llmc's kernels
        prompts       matmul precision of prefill tokens in llmc's kernels

    Blocks of matrices that read a normalised hidden state are at most `normed`: kernels quantize activations by the
    same blocks, and outlier channels of the hidden state cost most there (benchmarks/RESULTS.md).
    """

    block: int
    bits: int = 8
    lm_head_bits: int = 8
    stored: Mapping[str, BlockForm] = field(default_factory=dict)
    wide: frozenset[str] = frozenset()
    fold: bool = False
    panels: bool = False
    rolls: bool = False
    activations: bool = True
    cache: str = F16
    prompts: str = INT8
    normed: int = NORMED_BLOCK

    @property
    def components(self) -> dict[str, Any]:
        """Return the key components: blocks, and everything that differs from float32 and int8."""
        plain, found = OnnxOptions(self.block), dict[str, Any](block=self.block)
        for name in ("bits", "fold", "panels", "rolls", "activations", "cache", "prompts", "normed"):
            if getattr(self, name) != getattr(plain, name):
                found[name] = getattr(self, name)
        if "bits" in found:
            found["lm_head_bits"] = self.lm_head_bits
        if self.stored:
            found["stored"] = forms_in_key(self.stored)
        if self.wide:
            found["wide"] = " ".join(sorted(self.wide))
        return found

    def block_for(self, width: int, normed: bool = False) -> int:
        """Return the block size for `width` inputs: the largest allowed power of two that needs no padding."""
        most = min(self.block, self.normed) if normed else self.block
        return next((b for b in reversed(GROUP_SIZES) if b <= most and width % b == 0), min(most, 32))

    def format(self, sources: Sequence[str], width: int, normed: bool = False, lm_head: bool = False) -> MatrixFormat:
        bits = self.lm_head_bits if lm_head or of_adapters(sources) else self.bits
        if not self.wide.isdisjoint(sources):
            bits = 8
        forms = [self.stored.get(name) for name in sources]
        held = [form for form in forms if form is not None]
        four, order = len(held) == len(forms) and all(form.bits == 4 for form in held), common_order(forms)
        if not held or order is None or not (four or bits == 8):
            return self._own_format(bits, width, normed)
        block = common_block(held, self.normed if normed else KEPT_BLOCK)
        offsets, zeros = any(form.offsets for form in held), all(form.offsets in ("", "zeros") for form in held)
        kept, reordered = 4 if four else 8, bool(order) or any(form.turned for form in held)
        if self.panels and len(held) == len(forms):
            if held[0].table and len({form.table for form in held}) == 1:
                table = held[0].table
                return MatrixFormat(f"kept{table}", 4, block, order=order, table=table, reordered=reordered)
            kept = 6 if not four and all(map(_in_six, held)) else kept
        return MatrixFormat(f"kept{kept}", kept, block, offsets, offsets and zeros, order, reordered=reordered)

    def runs(self, sources: Sequence[str], width: int, normed: bool = False, lm_head: bool = False) -> list[int]:
        """Return run lengths of adjacent `sources` that share one matrix: equal bits and input order."""
        alone = [self.format([name], width, normed, lm_head) for name in sources]
        return [len(list(alike)) for _, alike in groupby(alone, lambda held: (held.bits, held.table, held.order))]

    def expert_formats(self, into: str, out: str, width: int, features: int) -> tuple[MatrixFormat, MatrixFormat]:
        """Return the formats of experts' two matrices, with `width` normed inputs and with `features`.

        One operator multiplies both, so a checkpoint's blocks are kept only where both have the same bits and offsets.
        """
        built = self.format([into], width, normed=True), self.format([out], features)
        if len({(held.bits, held.beside, held.table) for held in built}) == 1 and not any(held.order for held in built):
            return built
        return self._own_format(self.bits, width, normed=True), self._own_format(self.bits, features, normed=False)

    def _own_format(self, bits: int, width: int, normed: bool) -> MatrixFormat:
        block = self.block_for(width, normed)
        return MatrixFormat("q4", 4, block, offsets=True) if bits == 4 else MatrixFormat("q8", 8, block)


def _in_six(form: BlockForm) -> bool:
    return (form.stored_bits or form.bits) <= _FEWER and form.offsets != "zeros" and form.block % _FEWER_BLOCK == 0


def panel_bits(form: BlockForm) -> int:
    """Return the bits of each weight in panels that hold only this form."""
    return 4 if form.table else 6 if form.bits == 8 and _in_six(form) else form.bits
