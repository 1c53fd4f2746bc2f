"""The fake Gaudi fails as the real one does: what tests over it rest on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.fakes import gaudi


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Any:
    return gaudi.install(monkeypatch)


@pytest.fixture
def lazy(monkeypatch: pytest.MonkeyPatch) -> Any:
    return gaudi.install(monkeypatch, lazy=True)


def compiled(work: Callable[[], Any]) -> int:
    from habana_frameworks.torch.hpu.metrics import metric_localcontext

    with metric_localcontext("graph_compilation") as local:
        work()
    return int(dict(local.stats())["TotalNumber"])


def on_card(*sizes: int) -> torch.Tensor:
    return torch.ones(sizes).to(torch.device("hpu", 0))


def test_host_and_card_do_not_mix(eager: Any) -> None:
    with pytest.raises(RuntimeError, match="at least two devices, hpu:0 and cpu"):
        on_card(2) + torch.ones(2)


def test_another_shape_or_number_is_another_graph(eager: Any) -> None:
    two, three = on_card(2), on_card(3)
    assert compiled(lambda: two + two) == 1
    assert compiled(lambda: two + two) == 0
    assert compiled(lambda: three + three) == 1
    assert compiled(lambda: two.mul(2)) == 1
    assert compiled(lambda: two.mul(3)) == 1


def test_lazy_mode_compiles_what_it_gathered_at_mark_step_or_where_the_host_reads(lazy: Any) -> None:
    import habana_frameworks.torch.core as core

    one = on_card(2)
    assert compiled(lambda: one.add(one).mul(one)) == 0
    assert compiled(core.mark_step) == 1
    assert compiled(lambda: (one.add(one).mul(one)).cpu()) == 0
    assert compiled(lambda: (one.mul(one)).cpu()) == 1


def test_compile_only_mode_runs_nothing_and_returns_garbage(eager: Any) -> None:
    from habana_frameworks.torch.internal.bridge_config import env_setting

    kept = on_card(2)

    def write(tensor: torch.Tensor) -> torch.Tensor:
        kept.index_copy_(0, torch.zeros(1, dtype=torch.long, device=tensor.device), tensor.narrow(0, 0, 1))
        return tensor + tensor

    run = torch.compile(write, backend="hpu_backend", fullgraph=True, options={"force_static_compile": True})
    with env_setting("PT_COMPILE_ONLY_MODE", True):
        assert run(on_card(2).mul(7)).cpu().isnan().all()
    assert kept.cpu().tolist() == [1, 1]
    assert compiled(lambda: run(on_card(2))) == 0
    with pytest.raises(KeyError), env_setting("PT_HPU_NO_SUCH_SETTING", True):
        pass


def test_a_graph_reads_its_inputs_where_they_were_and_wants_the_lazy_mode(lazy: Any) -> None:
    from habana_frameworks.torch import hpu

    given, captured = on_card(2), hpu.HPUGraph()
    with hpu.graph(captured):
        made = given.add(1).mul(2)
    given.copy_(torch.tensor([2.0, 3.0]))
    captured.replay()
    assert made.cpu().tolist() == [6, 8]


def test_memory_is_what_tensors_take_and_views_take_none(eager: Any) -> None:
    held = on_card(1024)
    assert eager.card().in_use == 4096
    view = held.narrow(0, 0, 10)
    assert eager.card().in_use == 4096
    del held, view
    assert eager.card().in_use == 0
    with pytest.raises(RuntimeError, match="PT_DEVMEM Allocation failed for size::2147483648"):
        torch.zeros(1 << 29, device=torch.device("hpu", 0))
