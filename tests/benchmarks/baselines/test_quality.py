"""Divergence from float32 over teacher-forced text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from baselines.quality import CLASSES, Quality, compare

from llmc.errors import VerificationError


def saved(path: Path, logits: object) -> Path:
    np.save(path, np.asarray(logits, np.float32))
    return path


def test_divergence_is_of_the_reference_from_the_engine(tmp_path: Path) -> None:
    """KL of (1/2, 1/2) from (1/4, 3/4): half the sum of ln 2 and ln 2/3."""
    reference = saved(tmp_path / "a.npy", [[0.0, 0.0]])
    found = compare(reference, saved(tmp_path / "b.npy", [[0.0, np.log(3)]]))
    assert found.mean_kl == pytest.approx(0.5 * (np.log(2) + np.log(2 / 3)))
    assert found.tokens == 1


def test_equal_logits_diverge_by_nothing_whatever_is_added(tmp_path: Path) -> None:
    logits = np.random.default_rng(0).normal(size=(130, 7))
    found = compare(saved(tmp_path / "a.npy", logits), saved(tmp_path / "b.npy", logits + 5))
    assert found.mean_kl == pytest.approx(0, abs=1e-6)
    assert found.top1 == 1 and found.tokens == 130


def test_the_first_tokens_of_each_text_do_not_count(tmp_path: Path) -> None:
    wanted, got = np.zeros((7, 2)), np.zeros((7, 2))
    got[[0, 1, 4, 5]] = [0, 9]
    paths = saved(tmp_path / "a.npy", wanted), saved(tmp_path / "b.npy", got)
    assert compare(*paths, lengths=[4, 3], first=2).mean_kl == 0
    assert compare(*paths, lengths=[4, 3], first=1).mean_kl > 0


def test_columns_that_pad_the_vocabulary_do_not_count(tmp_path: Path) -> None:
    found = compare(saved(tmp_path / "a.npy", [[1.0, 2.0]]), saved(tmp_path / "b.npy", [[1.0, 2.0, 99.0]]))
    assert found.mean_kl == 0


@pytest.mark.parametrize(("logits", "said"), [([[1.0]], "shape"), ([[np.nan, 1.0]], "NaN or infinity")])
def test_other_shapes_and_no_numbers_are_refused(logits: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match=said):
        compare(saved(tmp_path / "a.npy", [[1.0, 2.0]]), saved(tmp_path / "b.npy", logits))


def test_every_divergence_has_a_class() -> None:
    names = [Quality(1, kl, kl, 1.0).class_name for kl in (0, 0.005, 0.0065, 0.02, 3.0)]
    assert names == [name for name, _ in CLASSES]
