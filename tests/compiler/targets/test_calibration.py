"""The calibration stage: a bound on the divergence decides which matrices stay in 8 bits, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.store.store import Store
from llmc.compiler.architectures.shared.names import EMBED_LM_HEAD
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.checkpoint.calibrated import FORM
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.compiler.stages import StageReport, Stages
from llmc.compiler.targets import open_target
from llmc.compiler.targets.calibration import Mixed, calibrated, mixed_lines, require_calibratable, sequences_in
from llmc.compiler.verification.texts import PASSAGES
from llmc.compiler.weights.calibration import TOKENS
from llmc.errors import InputError, VerificationError
from llmc.runtime.bundle import Bundle
from llmc.runtime.text.tokenizer import Tokenizer
from tests.compiler import tiny
from tests.tiers import default_cases


def stages_in(folder: Path, reported: list[StageReport] | None = None) -> Stages:
    model = folder / "model"
    if not model.exists():
        tiny.write_model(model, "llama")
    report = (lambda _: None) if reported is None else reported.append
    return Stages(Store(folder / "store"), open_checkpoint(model), tiny.tiny_plan(), report)


def options(**given: Any) -> CompileOptions:
    return CompileOptions.of("openvino", quantize="int4", **given)


def test_a_bound_leaves_the_dearest_in_8_bits_and_says_so(tmp_path: Path) -> None:
    reported: list[StageReport] = []
    stages = stages_in(tmp_path, reported)
    _, loose = calibrated(stages, options(max_kl=10.0), 0.0)
    assert loose.wide == frozenset()
    reached = loose.facts["mixed"]["mean_kl"]
    same, mixed = calibrated(stages, options(max_kl=reached / 2), 0.0)
    assert same.checkpoint is stages.checkpoint, "no codes were chosen"
    facts = mixed.facts["mixed"]
    assert 0 < facts["in_8_bits"] == len(mixed.wide) < facts["matrices"]
    assert 4 < facts["bits"] < 8
    assert facts["mean_kl"] <= reached / 2
    for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        held = {name.rsplit(".", 2)[0] for name in mixed.wide if name.split(".")[-2] in group}
        for before in held:
            assert {f"{before}.{name}.weight" for name in group} <= mixed.wide, "fused matrices share a format"
    (line,) = mixed_lines(mixed.facts)
    assert f"of {facts['matrices']} matrices in layers {facts['in_8_bits']} in 8 bits" in line
    assert mixed_lines({}) == []
    parts = [event for event in reported if event.total > 1]
    assert {event.name for event in parts} == {"sense", "mix"} and parts[-1].index == parts[-1].total


def test_embedding_and_head_have_the_bits_that_the_bound_allows_or_that_were_requested(tmp_path: Path) -> None:
    stages = stages_in(tmp_path)

    def found(bound: float, **given: Any) -> tuple[Mixed, dict[str, Any]]:
        _, mixed = calibrated(stages, options(max_kl=bound, **given), 0.0)
        assert mixed.lm_head_bits == mixed.facts["mixed"]["lm_head_bits"]
        assert mixed.wide.isdisjoint(EMBED_LM_HEAD)
        return mixed, dict(mixed.facts["mixed"])

    (loose, every), (_, layers) = found(10.0), found(10.0, lm_head_bits=8)
    assert (loose.lm_head_bits, layers["lm_head_bits"]) == (4, 8)
    assert layers["mean_kl"] < every["mean_kl"]
    assert "; embedding and lm_head in 4; a mean KL of" in mixed_lines(loose.facts)[0]
    tight, _ = found(layers["mean_kl"] / 20)
    assert tight.lm_head_bits == 8
    ends = every["mean_kl"] - layers["mean_kl"]
    forced, facts = found(layers["mean_kl"] / 2 + ends, lm_head_bits=4)
    assert forced.lm_head_bits == 4 and forced.wide
    assert facts["mean_kl"] <= layers["mean_kl"] / 2 + ends
    with pytest.raises(
        VerificationError, match=r"with all \d+ matrices in 8 bits with --lm-head-bits 4 the mean KL is"
    ):
        found(ends / 4, lm_head_bits=4)


@default_cases(1)
@pytest.mark.parametrize(("device", "more"), [("openvino", {}), ("onnxruntime", {"kernels": "onnxruntime"})])
def test_a_bundle_has_the_head_that_was_chosen(device: str, more: dict[str, Any], tmp_path: Path) -> None:
    model, store, sizes = str(tiny.write_model(tmp_path / "model", "llama")), Store(tmp_path / "store"), {}
    for head in (8, None):
        requested = CompileOptions.of(device, quantize="int4", max_kl=10.0, lm_head_bits=head, verify="none", **more)
        built = compile_bundle(model, tmp_path / f"bundle-{head}", tiny.kinds_plan(), requested, store, lambda _: None)
        weights = Bundle.open(built.bundle).files.path("weights")
        sizes[built.analysis["mixed"]["lm_head_bits"]] = weights.stat().st_size
    assert sizes.keys() == {4, 8} and sizes[4] < sizes[8]


def test_a_text_lowers_what_stays_in_8_bits_and_is_read_once_for_all_bounds(tmp_path: Path) -> None:
    reported: list[StageReport] = []
    stages = stages_in(tmp_path, reported)
    (text := tmp_path / "text").write_text(
        "The keeper of the lighthouse wrote what he saw, and what he did not see. " * 20
    )
    built, loose = calibrated(stages, options(max_kl=10.0, calibrate=str(text)), 0.0)
    names = {name for name in built.checkpoint.tensor_names() if built.checkpoint.stored_form(name) == FORM}
    assert len(names) == loose.facts["mixed"]["matrices"]
    _, mixed = calibrated(stages, options(max_kl=loose.facts["mixed"]["mean_kl"] / 2, calibrate=str(text)), 0.0)
    assert mixed.wide < names
    ended = {event.name: event.cached for event in reported if event.seconds is not None}
    assert ended == {"calibrate": True, "sense": True, "mix": False}


def test_llmcs_own_text_has_each_passage_once_and_fills_what_is_read(tmp_path: Path) -> None:
    stages = stages_in(tmp_path)
    encode = Tokenizer(stages.checkpoint.tokenizer_json()).encode
    tokens = [token for sequence in sequences_in(stages.checkpoint, "own") for token in sequence]
    assert len(tokens) == TOKENS
    passages = [token for passage in PASSAGES for token in encode(f"{passage}\n\n")]
    assert tokens == passages[:TOKENS] or tokens[: len(passages)] == passages


def test_a_bound_that_8_bits_do_not_keep_is_refused_with_what_was_reached(tmp_path: Path) -> None:
    stages = stages_in(tmp_path)
    for bound, added in ((1e-9, 0.0), (0.005, 0.005)):
        with pytest.raises(VerificationError, match=r"--max-kl: with all \d+ matrices in 8 bits the mean KL is"):
            calibrated(stages, options(max_kl=bound), added)
    assert not list((tmp_path / "store").rglob("blocks")), "nothing of it is kept"


def test_bounds_that_are_none_are_one_error() -> None:
    for bound in (-0.1, 0.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match=r"--max-kl \S+ must be a number of nats above 0"):
            require_calibratable(options(max_kl=bound))
    with pytest.raises(InputError, match="--max-kl has a scale for each 32 inputs; leave out --group-size"):
        open_target("openvino").configure(options(max_kl=0.1, group_size=64))
    with pytest.raises(InputError, match="max-kl"):
        open_target("hpu").configure(CompileOptions.of("hpu", max_kl=0.1))


@pytest.mark.parametrize("device", ["openvino", "onnxruntime"])
def test_the_gate_has_the_bound_as_its_limit(device: str) -> None:
    target = open_target(device)
    for quantize in ("int4", "int8"):
        plain, bound = (
            target.verification.limits(target.configure(CompileOptions.of(device, quantize=quantize, **more)))
            for more in ({}, {"max_kl": 0.01})
        )
        assert plain.mean_kl > bound.mean_kl == 0.01
        assert bound.row_kl == pytest.approx(plain.row_kl / plain.mean_kl * 0.01)
        assert bound.quality == f"{plain.quality}, by --max-kl"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"lm_head_bits": 5}, "--lm-head-bits 5 must be 4 or 8"),
        (
            {"lm_head_bits": 4, "quantize": "int8"},
            "--lm-head-bits is for --quantize int4, and this is int8; leave it out",
        ),
    ],
)
def test_bits_of_a_head_that_are_not_offered_are_refused(given: dict[str, Any], why: str) -> None:
    for device in ("openvino", "onnxruntime"):
        with pytest.raises(InputError, match=why):
            open_target(device).configure(CompileOptions.of(device, **{"quantize": "int4", **given}))
