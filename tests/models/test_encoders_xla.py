"""Every family that embeds or scores, on XLA: a ragged batch with poisoned padding against transformers, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest

import llmc
from llmc.buckets.bucket import Bucket
from llmc.buckets.encoding import EncodePlan
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Provenance
from tests.compiler.encoders_tiny import ARCHITECTURES, write_encoder
from tests.models.test_encoders import judge, with_words
from tests.tiers import full

pytestmark = [full, pytest.mark.usefixtures("unoptimised_xla")]


def plan(task: str) -> EncodePlan:
    """One bucket: two texts, beyond the window of the families that have one."""
    return EncodePlan(Limits(40, 2, 80), (Bucket("prompt", 2, 40, 0),), Provenance("test"), task)


@pytest.mark.parametrize(
    ("encoder", "task"),
    [
        *((architecture, "score") for architecture in ARCHITECTURES),
        *((architecture, "embed") for architecture in ARCHITECTURES[:2]),
    ],
)
def test_numbers_are_those_of_transformers(encoder: str, task: str, tmp_path: Path) -> None:
    model = write_encoder(tmp_path / "model", encoder, task, labels=3)
    built = llmc.compile(
        model, tmp_path / "bundle", device="xla", task=task, plan=plan(task), jobs=1, cache_dir=tmp_path / "store"
    )
    assert (built.built, built.native, built.portable) == (1, 1, 0)
    assert built.verification["cosine"] > 0.99999
    assert built.verification["leak"] <= 1e-5
    assert built.verification["rows"] == 2


def test_a_decoder_scores_by_yes_against_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.compiler.checkpoint import sentence_files

    monkeypatch.setattr(sentence_files, "_RERANKER", ("J ", " D ", " A"))
    monkeypatch.setattr(sentence_files, "_INSTRUCTION", "i")
    folder = judge(tmp_path / "model", with_words("no", "yes"))
    found = []
    for device, how in (("openvino", {}), ("xla", {"plan": plan("score"), "jobs": 1})):
        llmc.compile(
            folder, tmp_path / device, device=device, dtype="f32", task="score", cache_dir=tmp_path / "store", **how
        )
        with llmc.LLM(tmp_path / device) as llm:
            found.append([one.outputs.score for one in llm.score("q", ["d", "e"])])
    assert found[1] == pytest.approx(found[0], abs=1e-5)
