"""Linear modules with selectable LoRA adapters; they replace the modules that adapters change.

adapter_layout.py defines the arithmetic. Each step says which adapter each token's row uses.
"""

from __future__ import annotations

from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmc.compiler.architectures.shared.names import LM_HEADS
from llmc.compiler.checkpoint.adapter_layout import AdapterLayout
from llmc.errors import CheckpointError

MASKS: ContextVar[list[Tensor]] = ContextVar("masks")
"""The mask of each token for each group, [B, Q, R]."""


class AdaptedLinear(nn.Linear):
    """`linear` plus the LoRA matmuls of group `group`, which has R `columns`."""

    def __init__(self, linear: nn.Linear, group: int, columns: int) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.group = group
        self.lora_A = nn.Linear(linear.in_features, columns, bias=False, device="meta")
        self.lora_B = nn.Linear(columns, linear.out_features, bias=False, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        """[.., in] → [.., out], for as many tokens as the step has."""
        low = self.lora_A(x)
        mask = MASKS.get()[self.group].reshape(low.shape).to(low.dtype)
        product: Tensor = functional.linear(x, self.weight, self.bias) + self.lora_B(low * mask)
        return product


class AdapterMasks(nn.Module):
    """Masks of a step's tokens, one for each group."""

    def __init__(self, layout: AdapterLayout) -> None:
        super().__init__()
        self._names: list[str] = []
        known: dict[tuple[int, ...], str] = {}
        for group in layout.groups:
            if group.ranks not in known:
                known[group.ranks] = f"masks_{len(known)}"
                self.register_buffer(known[group.ranks], torch.from_numpy(group.masks()), persistent=False)
            self._names.append(known[group.ranks])

    def forward(self, adapters: Tensor) -> list[Tensor]:
        """`adapters` [B, Q] int64, 0 for none → one mask [B, Q, R] per group."""
        built = {name: self.get_buffer(name)[adapters] for name in dict.fromkeys(self._names)}
        return [built[name] for name in self._names]


def adapt(model: nn.Module, layout: AdapterLayout) -> None:
    """Replace the modules that adapters change, and add `adapter_masks`.

    Raises CheckpointError for an adapter of anything but a linear module of a layer.
    """
    groups = list(layout.groups)
    for name, module in list(model.named_modules()):
        group = layout.group(name)
        if group is None:
            continue
        if type(module) is not nn.Linear or f"{name}.weight" in LM_HEADS:
            raise CheckpointError(
                f"{name} is a {type(module).__name__}, and selectable adapters can change only linear modules of "
                "layers: merge the adapters that change it (--lora)"
            )
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, AdaptedLinear(module, groups.index(group), group.columns))
    model.adapter_masks = AdapterMasks(layout)
