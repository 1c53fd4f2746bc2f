"""What a cache's precision does not hold is counted, and refused: on every executor, whatever it became there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmc.compiler.options import CompileOptions
from llmc.compiler.targets.base import Recorded
from llmc.compiler.targets.fake import FakeTarget
from llmc.compiler.verification.verify import beyond, beyond_in
from llmc.errors import VerificationError
from llmc.runtime.executors.fake.executor import FakeExecutor
from tests.devices import use
from tests.toy import Toy

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("dtype", "values", "count"),
    [("f16", [1.0, -65503.0, 0.0], 0), ("f16", [65504.0, -65504.0, INF, -INF, NAN, 1e30, 2.0], 6),
     ("bf16", [65504.0, 1e38, -1e38], 0), ("bf16", [INF, NAN, 1.0], 2), ("f32", [3e38, INF], 1), ("u8", [1e5, NAN], 1)],
)  # fmt: skip
def test_what_counts(dtype: str, values: list[float], count: int) -> None:
    tensor = np.array(values, np.float32).reshape(1, -1, 1)
    assert beyond([tensor, tensor], dtype) == 2 * count


@pytest.mark.parametrize(("options", "count"), [({"kv_cache_dtype": "f16", "dtype": "f32"}, 2), ({"dtype": "bf16"}, 0)])
def test_only_the_tokens_that_are_requested_count(options: dict[str, str], count: int) -> None:
    held = np.zeros((2, 8, 4), np.float32)
    held[0, [1, 5], 2] = 7e4
    shape = SimpleNamespace(states=())
    bundle = SimpleNamespace(manifest=SimpleNamespace(options=options), cache_shape=shape)
    executor: Any = SimpleNamespace(bundle=bundle, export_prefix=lambda slot, end: [held[:, :end], held[:, :end]])
    assert beyond_in(executor, [(0, 2, 6)]) == count
    assert beyond_in(executor, [(0, 6, 8)]) == 0
    shape.states = ("a state",)  # of a state no axis is tokens
    assert beyond_in(executor, [(0, 6, 8)]) == 2 * count


@pytest.mark.parametrize("specialise", [True, False])
@pytest.mark.parametrize("lost", [INF, 65504.0])
def test_a_compile_whose_cache_loses_values_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, specialise: bool, lost: float
) -> None:
    """The numbers that a key or value became are in the cache alone: no logit shows them."""
    toy = Toy.make(tmp_path)

    class Rounded(FakeExecutor):
        def export_prefix(self, slot: int, length: int) -> Any:
            held = super().export_prefix(slot, length)
            held[0][0, 0, 0] = lost
            return held

    class Half(FakeTarget):
        def recorded(self, options: CompileOptions) -> Recorded:
            return Recorded("fake", options={"kv_cache_dtype": "f16"})

    use(monkeypatch, target=Half, executor=Rounded)
    with pytest.raises(
        VerificationError, match=r"\d+ keys and values of prompt.* are beyond the range of the KV cache's"
    ):
        toy.compile(specialise=specialise)
    assert not toy.bundle.exists()
