"""The format of each matrix of a model: its family of blocks, its bits, and the inputs of a block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llmc.compiler.architectures.shared.block_form import BlockForm, common_block

NORMED_BLOCK = 32
KEPT_BLOCK = 64
_BLOCKS = (256, 128, 64, 32, 16)


@dataclass(frozen=True)
class MatrixFormat:
    """A matrix in blocks: the family of its recipes (nbits.py, recipes.py), whether blocks have an offset, and whether
    all of these are whole zero points."""

    family: str
    bits: int
    block: int
    offsets: bool = False
    zeros: bool = False


@dataclass(frozen=True)
class OnnxOptions:
    """The formats of a lowered model's matrices.

    `block`: at most so many inputs share a scale; 0 keeps float32. `bits`: 8 or 4, of what is not kept; the head and
    the embedding have `head_bits`, matrices of `wide` tensors 8. `stored`: the names of those tensors whose own blocks
    are kept, each with its form; blocks larger than KEPT_BLOCK are cut, which changes no value. `fold`: the packed form
    of a matrix holds its offsets (packing.py); otherwise graphs add blocksum(x) · offsetsᵀ. `panels`: matrices are laid
    out for llmc's own kernels (onnxruntime/kernels), which add offsets themselves. `rolls`: caches of layers with a
    window begin at a later token, which an input says.

    8-bit and kept blocks of matrices that read a normalised hidden state are at most NORMED_BLOCK: kernels quantise
    activations by the same blocks, and outlier channels of the hidden state cost most there (benchmarks/RESULTS.md).
    """

    block: int
    bits: int = 8
    head_bits: int = 8
    stored: Mapping[str, BlockForm] = field(default_factory=dict)
    wide: frozenset[str] = frozenset()
    fold: bool = False
    panels: bool = False
    rolls: bool = False

    def block_for(self, width: int, normed: bool = False) -> int:
        """Block for a matrix of `width` inputs: the largest power of two that is allowed and needs no padding."""
        most = min(self.block, NORMED_BLOCK) if normed else self.block
        return next((b for b in _BLOCKS if b <= most and width % b == 0), min(most, 32))

    def format(self, sources: Sequence[str], width: int, normed: bool = False, head: bool = False) -> MatrixFormat:
        """Format of the matrix of `sources`, one above the other, with `width` inputs."""
        bits, forms = self.head_bits if head else self.bits, [self.stored.get(name) for name in sources]
        if not self.wide.isdisjoint(sources):
            bits = 8
        held = [form for form in forms if form is not None]
        four = len(held) == len(forms) and all(form.bits == 4 for form in held)
        if not held or not (four or bits == 8):
            return self._own_format(bits, width, normed)
        block = common_block(held, NORMED_BLOCK if normed else KEPT_BLOCK)
        offsets, zeros = any(form.offsets for form in held), all(form.offsets in ("", "zeros") for form in held)
        return MatrixFormat("kept4" if four else "kept8", 4 if four else 8, block, offsets, offsets and zeros)

    def expert_format(self, width: int, normed: bool) -> MatrixFormat:
        """Format of experts' matrices with `width` inputs; no checkpoint has blocks of them that could be kept."""
        return self._own_format(self.bits, width, normed)

    def _own_format(self, bits: int, width: int, normed: bool) -> MatrixFormat:
        block = self.block_for(width, normed)
        return MatrixFormat("q4", 4, block, offsets=True) if bits == 4 else MatrixFormat("q8", 8, block)
