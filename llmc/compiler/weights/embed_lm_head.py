"""Embedding and lm_head in 4-bit blocks, in some calls of a model whose layers are replayed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from llmc.compiler.architectures.shared.names import EMBED_LM_HEAD
from llmc.compiler.checkpoint.base import stored_name
from llmc.compiler.checkpoint.calibrated import BLOCK
from llmc.compiler.frontend.replay import ReplayedModel, replaced
from llmc.compiler.weights.nbits import q4_values

if TYPE_CHECKING:
    from llmc.compiler.checkpoint.base import Checkpoint


class EmbedLmHead:
    """Rounds the embedding and lm_head of `replayed` to 4-bit blocks in the calls from number `first` on.

    The embedding is rounded where it runs, lm_head in `tail`. Matrices whose rows are no whole number of blocks, or
    that the checkpoint stores in 4 bits, stay as they are. A second float copy of each is kept, since both run again
    after all layers.
    """

    def __init__(self, checkpoint: Checkpoint, replayed: ReplayedModel, first: int) -> None:
        self._checkpoint, self._replayed, self._first = checkpoint, replayed, first
        self._values: dict[str, Tensor] = {}
        self._names: dict[nn.Module, str] = {}
        """Names in the checkpoint: a tied lm_head has the embedding's."""
        self.weights = 0
        known = checkpoint.tensor_names()
        modules = {module: f"{name}.weight" for name, module in replayed.model.named_modules()}
        for module in (replayed.model.get_input_embeddings(), replayed.model.get_output_embeddings()):
            if modules.get(module) not in EMBED_LM_HEAD:
                continue
            name = stored_name(modules[module], known)
            form, (height, width) = checkpoint.stored_form(name), checkpoint.shape(name)
            if width % BLOCK == 0 and (form is None or form.bits != 4):
                self.weights += 0 if name in self._names.values() else height * width
                self._names[module] = name
                module.register_forward_hook(self._rounded)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the rounded tensors, each once."""
        return tuple(dict.fromkeys(self._names.values()))

    def _rounded(self, module: nn.Module, given: tuple[Any, ...], _: object) -> Tensor | None:
        if self._replayed.call < self._first:
            return None
        name = self._names[module]
        if name not in self._values:
            self._values[name] = torch.from_numpy(q4_values((name,), self._checkpoint, BLOCK))
        with replaced({module: self._values[name]}):
            built: Tensor = module.forward(*given)
        return built
