"""Outcomes and predictions that others wrote: what is of another form than verification's own is no outcome."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.artifacts.key import Key
from llmc.artifacts.store.entries import Entry
from llmc.artifacts.store.store import Store
from llmc.buckets.bucket import Bucket
from llmc.compiler.verification.parts import Once, readable
from llmc.errors import ArtifactError
from tests.tiers import default_cases
from tests.toy import Toy

BUCKET = Bucket("decode", 2, 1, 16)
SOUND: dict[str, Any] = {
    "bucket": str(BUCKET), "runs": 2, "kl": [0.0, 1e-9], "equal": [True, False], "max_abs": 0.5, "leak": 0,
    "longest": 9, "executables": ["decode batch=2"], "beyond": 0, "unreached": 0,
}  # fmt: skip
ACCURACY = {
    "tokens": 4, "mean_kl": 0.1, "p99_kl": 0.2, "max_kl": 0.2, "top1": 1.0, "parts": {"prose": 0.1}, "text": "sha256:0",
    "perplexity": 3.5, "reference_perplexity": None,
}  # fmt: skip
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


def test_what_runs_leave_is_readable() -> None:
    assert readable(BUCKET, SOUND)
    assert readable(Once(BUCKET), {**SOUND, "runs": 1})
    assert readable("greedy", {"sequences": 6, "differing": ["a text"]})
    assert readable("accuracy", {"accuracy": ACCURACY})


@pytest.mark.parametrize("name", SOUND)
def test_an_outcome_of_before_a_field_was_is_not(name: str) -> None:
    assert not readable(BUCKET, {key: value for key, value in SOUND.items() if key != name})


@pytest.mark.parametrize(
    "change",
    [
        {"bucket": "decode 4 x 1 + 16"}, {"runs": 1}, {"kl": [0.0]}, {"kl": [float("nan"), 0.0]}, {"kl": "00"},
        {"equal": [1, 0]}, {"leak": None}, {"leak": True}, {"longest": -1}, {"executables": [5]}, {"top_differs": "no"},
    ],
)  # fmt: skip
def test_another_form_is_not(change: dict[str, Any]) -> None:
    assert not readable(BUCKET, {**SOUND, **change})


@given(st.sampled_from(sorted(SOUND)), ANYTHING)
def test_no_value_is_an_error(name: str, value: Any) -> None:
    for part in (BUCKET, Once(BUCKET), "greedy", "accuracy"):
        assert readable(part, {name: value}) is False
    readable(BUCKET, {**SOUND, name: value})
    readable("accuracy", {"accuracy": value})


@default_cases(2)
@pytest.mark.parametrize("name", [*SOUND, "sequences", "differing", "accuracy"])
def test_a_part_with_such_an_outcome_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    toy = Toy.make(tmp_path)
    before = toy.compile().verification
    obtain = Store.obtain

    def forged(self: Store, key: Key) -> Entry | None:
        entry = obtain(self, key)
        if entry is None or key.kind != "verify" or name not in entry.meta:
            return entry
        return entry._replace(meta={**entry.meta, name: {"no": "number"}})

    monkeypatch.setattr(Store, "obtain", forged)
    assert toy.compile().verification == before


@pytest.mark.parametrize("forgery", ["not an archive", "no arrays", "other arrays"])
def test_predictions_of_another_form_are_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgery: str
) -> None:
    toy, file = Toy.make(tmp_path), tmp_path / "forged.npz"
    file.write_bytes(b"[]")
    if forgery != "not an archive":
        np.savez(file, **({"0.tokens": np.zeros((2, 2))} if forgery == "other arrays" else {"a": np.zeros(1)}))
    toy.compile(verify="none")
    path = Store.path
    probes: list[str] = []
    from llmc.compiler.pipeline import verification as stage

    load = stage._load

    def forged(stages: Any, entry: Entry, parts: Any) -> Any:
        probes.extend(blob.digest for blob in entry.outputs.values())
        return load(stages, entry, parts)

    monkeypatch.setattr(stage, "_load", forged)
    monkeypatch.setattr(
        Store, "path",
        lambda self, blob: file if getattr(blob, "digest", blob) in probes else path(self, blob),
    )  # fmt: skip
    with pytest.raises(ArtifactError, match=r"predictions .* have an unknown form"):
        toy.compile()
