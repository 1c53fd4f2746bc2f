"""Projections of a layer that read one input: query, key and value; gate and up. Targets fuse them, so they must share
a format."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from llmc.compiler.architectures.shared.experts import is_router
from llmc.compiler.checkpoint.calibrated import BLOCK, FORM
from llmc.errors import CheckpointError

if TYPE_CHECKING:
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.frontend.replay import ReplayedModel
    from llmc.compiler.weights.nbits import Array


@dataclass
class MatrixGroup:
    """Matrices that read one input: module → tensor name, stacked by rows."""

    modules: dict[Any, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors."""
        return tuple(self.modules.values())

    @property
    def width(self) -> int:
        """Number of inputs, K."""
        return int(next(iter(self.modules)).in_features)

    def weight(self) -> Array:
        """The stacked weights [N, K]. Raises CheckpointError if one is NaN or infinite."""
        found = np.concatenate([module.weight.detach().numpy() for module in self.modules])
        if not np.isfinite(found).all():
            raise CheckpointError(
                f"{', '.join(self.names)}: some weights are NaN or infinite; fetch the checkpoint again"
            )
        return found

    def split(self, weight: Array) -> dict[nn.Module, Tensor]:
        """Split `weight` [N, K] into the matrix of each module."""
        heights = [module.out_features for module in self.modules]
        return dict(zip(self.modules, torch.from_numpy(weight).split(heights), strict=True))


class Groups:
    """Finds the matrix groups of the layer that currently runs. Counted are linear modules whose rows are whole blocks.
    Routers and matrices that the checkpoint stores in 4 bits are left out."""

    def __init__(self, checkpoint: Checkpoint, replayed: ReplayedModel) -> None:
        self._found: list[MatrixGroup] = []
        self._last: tuple[Tensor, MatrixGroup] | None = None
        self._watches = True
        self._path = checkpoint.path
        self._any = False
        self._names = {module: f"{name}.weight" for name, module in replayed.model.named_modules()}
        for layer in replayed.layers:
            for module in layer.modules():
                if isinstance(module, nn.Linear) and module.in_features % BLOCK == 0:
                    name = self._names[module]
                    form = checkpoint.stored_form(name) or checkpoint.reordered_form(name)
                    if not is_router(name) and (form is None or form.bits != 4 or form == FORM):
                        module.register_forward_pre_hook(self._watch)

    def take(self) -> list[MatrixGroup]:
        """Return the groups found since the last call, in the order of their inputs; stop looking until `watch`."""
        found, self._found, self._last, self._watches = self._found, [], None, False
        self._any = self._any or bool(found)
        return found

    def watch(self) -> None:
        """Look for the groups of the next layer."""
        self._watches = True

    def require_any(self) -> None:
        """Raise CheckpointError if no layer had a group."""
        if not self._any:
            raise CheckpointError(
                f"{self._path}: there is nothing to calibrate: every projection is stored in 4-bit blocks already, or "
                f"its row length is not a multiple of {BLOCK}"
            )

    def _watch(self, module: nn.Module, given: tuple[Tensor, ...]) -> None:
        if not self._watches:
            return
        if self._last is not None and self._last[0] is given[0]:
            group = self._last[1]
        else:
            group = next((g for g in self._found if module in g.modules), None) or MatrixGroup()
        if not group.modules:
            self._found.append(group)
        group.modules[module] = self._names[module]
        self._last = given[0], group
