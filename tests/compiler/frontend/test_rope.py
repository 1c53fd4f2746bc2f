"""Every type of rotary scaling: a trace has transformers' own angles, beyond the original length where it may go on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from llmc.compiler.frontend.trace import trace
from llmc.compiler.program.import_fx import import_program
from tests.compiler import tiny
from tests.compiler.replay import Replay, two_part_run
from tests.tiers import default_cases

ORIGINAL = 16
_SHORT, _LONG = ([start + i / 10 for i in range(8)] for start in (1.0, 1.5))
TYPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {
        "factor": 4.0, "original_max_position_embeddings": ORIGINAL, "attention_factor": 1.3, "beta_fast": 8.0,
        "beta_slow": 2.0, "truncate": False,
    },
    "yarn-mscale": {
        "factor": 4.0, "original_max_position_embeddings": ORIGINAL, "mscale": 0.7, "mscale_all_dim": 0.9,
    },
    "dynamic": {"factor": 4.0},
    "longrope": {
        "short_factor": _SHORT, "long_factor": _LONG, "factor": 8.0, "original_max_position_embeddings": ORIGINAL,
    },
}  # fmt: skip
REACH = dict.fromkeys(TYPES, 40) | {"longrope": ORIGINAL}
"""Positions that are tried; tiny.TINY has 128, from which on `dynamic` changes."""


@pytest.fixture(params=TYPES)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = str(request.param)
    rope = {"rope_type": name.split("-", maxsplit=1)[0], "rope_theta": 1e4, **TYPES[name]}
    monkeypatch.setitem(tiny.VARIANTS, f"rope-{name}", {"rope_parameters": rope})
    return name


@default_cases(2)
def test_the_fused_program_has_tables_of_transformers_angles(kind: str) -> None:
    case, count = f"rope-{kind}", REACH[kind]
    rotary = tiny.model(case).model.rotary_emb
    cos, sin = rotary(torch.zeros(1, count, 1), torch.arange(count)[None])
    tables = import_program(trace(tiny.config(case), "fused"), count).tables
    assert len(tables) == 2
    for built, wanted in zip(tables.values(), (cos, sin), strict=True):
        np.testing.assert_allclose(built, wanted[0].numpy(), atol=1e-6)


@default_cases(1)
@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope"], indirect=True)
def test_portable_programs_compute_transformers_logits(kind: str) -> None:
    count = REACH[kind]
    texts = [list(range(5, 5 + count)), [7, *range(100, 99 + count)]]
    rows = Replay(f"rope-{kind}", two_part_run(f"rope-{kind}"), texts, capacity=count, in_place=False)
    for counts in ((count - 6, 4), (3, count - 6), (1, 1), (1, 1)):
        assert max(rows.step(counts, count)) < 1e-4
