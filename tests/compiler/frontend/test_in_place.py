"""What a model writes in place becomes a value where nothing reads what it wrote into, and is refused elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from llmc.compiler.frontend.in_place import without_writes
from llmc.errors import CompileError


def exported(function: Callable[[Tensor], Tensor]) -> torch.export.ExportedProgram:
    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x + 1)

    return torch.export.export(Module(), (torch.ones(2, 3),), strict=False)


def test_a_quotient_in_place_is_a_quotient() -> None:
    def share(x: Tensor) -> Tensor:
        x /= x.sum(-1, keepdim=True)
        return x * 2

    program = without_writes(exported(share))
    assert [str(n.target) for n in program.graph.nodes if "div" in n.name] == ["aten.div.Tensor"]
    torch.testing.assert_close(program.graph_module(torch.ones(2, 3))[0], torch.full((2, 3), 2 / 3))


def test_what_is_read_after_it_was_written_into_is_what_was_written() -> None:
    def clamped(x: Tensor) -> Tensor:
        x.clamp_(max=1.0)
        return x * 2

    program = without_writes(exported(clamped))
    torch.testing.assert_close(program.graph_module(torch.ones(2, 3))[0], torch.full((2, 3), 2.0))


def test_a_view_of_it_that_is_read_later_is_refused() -> None:
    def through(x: Tensor) -> Tensor:
        seen = x.view(6)
        x.mul_(2.0)
        return seen + 1

    with pytest.raises(CompileError, match=r"the model writes in place \(.*mul_.*reads the written tensor later"):
        without_writes(exported(through))
