"""Pooling, by its definition, over padding that holds NaN."""

from __future__ import annotations

import numpy as np
import pytest

from llmc.errors import ArtifactError
from llmc.runtime.pooling.modules import Dense, Normalize, Pooling, PoolingDescription, activated, embed, pooled

LENGTHS = np.array([3, 5, 1])
HIDDEN = np.random.default_rng(0).normal(size=(3, 5, 4)).astype(np.float32)
HIDDEN[np.arange(5) >= LENGTHS[:, None]] = np.nan


def rows(skip: int = 0) -> list[np.ndarray]:
    return [HIDDEN[row, skip:length] for row, length in enumerate(LENGTHS)]


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        ("cls", lambda x: x[0]),
        ("lasttoken", lambda x: x[-1]),
        ("max", lambda x: x.max(0)),
        ("mean", lambda x: x.mean(0)),
        ("mean_sqrt_len_tokens", lambda x: x.sum(0) / np.sqrt(len(x))),
        ("weightedmean", lambda x: np.average(x, axis=0, weights=np.arange(1, len(x) + 1))),
    ],
)
def test_each_mode_sees_live_tokens_alone(mode: str, wanted: object) -> None:
    found = pooled(Pooling((mode,)), HIDDEN, LENGTHS)
    assert np.allclose(found, [wanted(x) for x in rows()], atol=1e-6)  # type: ignore[operator]


def test_modes_stand_end_to_end_and_a_prompt_may_be_left_out() -> None:
    found = pooled(Pooling(("cls", "mean")), HIDDEN[:2], LENGTHS[:2], skip=1)
    assert np.allclose(found[:, :4], [x[0] for x in rows(1)[:2]])
    assert np.allclose(found[:, 4:], [x.mean(0) for x in rows(1)[:2]], atol=1e-6)


def test_modules_follow_each_other() -> None:
    random = np.random.default_rng(1)
    weight, bias = random.normal(size=(2, 4)).astype(np.float32), np.ones(2, np.float32)
    description = PoolingDescription("embed", 5, (Pooling(("mean",)), Dense("w", "b", "tanh"), Normalize()))
    found = embed(description, {"w": weight, "b": bias}, HIDDEN, LENGTHS)
    dense = np.tanh(np.array([x.mean(0) for x in rows()]) @ weight.T + bias)
    assert np.allclose(found, dense / np.linalg.norm(dense, axis=1, keepdims=True), atol=1e-5)


def test_activations() -> None:
    x = np.array([[-1.0, 0.0, 2.0]], np.float32)
    assert np.allclose(activated("sigmoid", x), 1 / (1 + np.exp(-x)))
    assert np.allclose(activated("softmax", x).sum(), 1)
    assert np.allclose(activated("gelu", x), [[-0.15865526, 0.0, 1.9544997]])
    assert np.allclose(activated("relu", x), [[0, 0, 2]])


def test_a_description_is_read_as_it_was_written_and_nothing_else_is() -> None:
    built = PoolingDescription(
        "embed", 7, (Pooling(("mean", "cls"), False), Dense("w", None, "tanh"), Normalize()), {"q": "find: "}, "q"
    )
    assert PoolingDescription.parse(built.to_json(), "bundle") == built
    for wrong in (
        b"{}",
        b"[]",
        b"x",
        built.to_json().replace(b'"mean"', b'"sum"'),
        built.to_json().replace(b"7", b"0"),
    ):
        with pytest.raises(ArtifactError, match=r"bundle: pooling.json is not what llmc writes"):
            PoolingDescription.parse(wrong, "bundle")
