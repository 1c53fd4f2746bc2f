"""Tables of states in the layouts of OpenVINO's operators: what is read of a slot is what was written, and stays."""

from __future__ import annotations

import numpy as np
import pytest

from llmc.runtime.cache_shape import CacheShape, CacheTensor
from llmc.runtime.executors.openvino.paged_cache import StateTables, layouts_of

SHAPES = {"conv": (3, 6), "delta": (2, 4, 5), "scan": (2, 4, 5), "columns": (6, 1, 4)}
ROWS = {"conv": (6, 4), "delta": (2, 5, 4), "scan": (2, 4, 5), "columns": (4, 6)}
KEPT = tuple(CacheTensor(i, name, "state", shape) for i, (name, shape) in enumerate(SHAPES.items()))
SHAPE = CacheShape(len(KEPT), KEPT)
NAN = float("nan")


def states(seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape).astype(np.float32) for shape in SHAPES.values()]


def test_states_are_read_as_they_were_written_and_go_with_a_copy() -> None:
    tables = StateTables(KEPT, list(SHAPES), slots=3, more=2)
    assert [table.shape for table in tables.tables] == [(6, *row) for row in ROWS.values()]
    tables.write(0, states(1))
    tables.write(1, states(2))
    tables.copy(0, 2)
    for slot, seed in ((0, 1), (1, 2), (2, 1)):
        for got, wanted in zip(tables.read(slot), states(seed), strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_nan_fill_reaches_a_slot_and_what_no_slot_holds_but_never_the_row_of_zeros() -> None:
    tables = StateTables(KEPT, list(SHAPES), slots=3, more=2)
    tables.write(1, states(2))
    tables.nan_fill(0, NAN)
    for table in tables.tables:
        assert np.isnan(table[0]).all()
        assert np.isnan(table[tables.filler :]).all()
        assert len(table) == tables.filler + 2
        assert not table[tables.zeros].any()
    assert not any(np.isnan(state).any() for state in tables.read(1))


def test_layouts_follow_from_a_models_inputs() -> None:
    rows = {f"{name}_state.{i}": row for i, (name, row) in enumerate(ROWS.items())}
    assert layouts_of(dict(reversed(rows.items())), SHAPE) == list(SHAPES)
    wrong = [
        {name: row for name, row in rows.items() if "scan" not in name}, {**rows, "scan_state.2": (2, 5, 4)},
        {**rows, "scan_state.9": (2, 4, 5)}, {**rows, "other_state.0": (6, 4)},
    ]  # fmt: skip
    for changed in wrong:
        with pytest.raises(ValueError, match="are not of the states"):
            layouts_of(changed, SHAPE)
