"""LoRA adapters that requests choose, on the fake device, whose embedding and head an adapter changes: every token
against the model that its adapter is merged into."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import copytree

import pytest

from llmc.compiler.verification.toy_reference import ToyReference
from llmc.errors import ArtifactError, InputError, VerificationError
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.batched_core import BatchedCore
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.engine.speculation import SequenceDrafter
from llmc.runtime.executors import open_executor
from llmc.runtime.llm import BundleLLM
from llmc.testing.toy import VOCAB
from tests.adapters import NAMES, references, toy_with_adapters
from tests.devices import use
from tests.manifests import edit_manifest
from tests.tiers import default_cases
from tests.toy import Toy

SEQS, PROMPT = 4, [3, 5, 9, 20, 7, 1, 8, 8]


KINDS: dict[str, dict[str, object]] = {
    "fake": {}, "exact": {"specialise": False}, "fake:ragged": {"device": "fake:ragged"},
    "fake:paged=72": {"device": "fake:paged=72"},
}  # fmt: skip


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Toy]:
    """The same model on each kind of device."""
    first = toy_with_adapters(tmp_path_factory.mktemp("toy"))
    built = {"fake": first}
    for kind, options in list(KINDS.items())[1:]:
        built[kind] = Toy(first.model, first.store, first.bundle.with_name(kind.replace(":", "-")), first.plan)
        built[kind].compile(**options)
    return built


@pytest.fixture(scope="module", params=KINDS)
def toy(toys: dict[str, Toy], request: pytest.FixtureRequest) -> Toy:
    return toys[request.param]


@pytest.fixture
def engine(toy: Toy) -> Iterator[BatchedCore]:
    bundle = Bundle.open(toy.bundle)
    executor = open_executor(bundle, SEQS + 2)
    yield BatchedCore(bundle.plan, executor, VOCAB, min_prefix=2)
    executor.close()


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)


@default_cases(2)
def test_rows_of_a_batch_have_adapters_of_their_own(toy: Toy, engine: BatchedCore) -> None:
    wanted = references(toy.model)
    prompts = [PROMPT, PROMPT[:3], [4, 4], PROMPT[2:], [9], PROMPT]
    adapters = [1, 0, 3, 2, 3, 3]
    built = engine.complete(prompts, [greedy(5)] * len(prompts), adapters)
    assert built == [wanted[a].greedy(p, 5) for a, p in zip(adapters, prompts, strict=True)]


def test_what_was_cached_with_another_adapter_is_not_reused(toy: Toy, engine: BatchedCore) -> None:
    """Neither what an ended sequence left, nor what one that runs, or comes in the same step, computes."""
    wanted = [one.greedy(PROMPT, 4) for one in references(toy.model)]
    assert len({tuple(tokens) for tokens in wanted}) == 4, "each adapter has an answer of its own"
    for adapter in (1, 0, 2, 1, 3, 0):
        assert engine.complete([PROMPT], [greedy(4)], [adapter]) == [wanted[adapter]]
    assert engine.complete([PROMPT] * 4, [greedy(4)] * 4, [2, 3, 0, 1]) == [wanted[a] for a in (2, 3, 0, 1)]
    engine.add(100, PROMPT, engine.sampler(PROMPT, greedy(4)), adapter=2)
    admitted = [outcome.admitted for outcome in iter(engine.step, None) if outcome and outcome.admitted]
    assert admitted == [((100, len(PROMPT) - 1),)], "what its own adapter left is"


def test_a_failed_sequence_takes_nothing_of_other_adapters(toy: Toy, engine: BatchedCore) -> None:
    engine.complete([PROMPT], [greedy(2)], [1])
    engine.add(7, PROMPT, engine.sampler(PROMPT, greedy(9)), adapter=2)
    engine.step()
    engine.scheduler.fail(7)
    kept = [held for held in engine.scheduler._slots.retained if held is not None]  # type: ignore[attr-defined]
    assert [held.adapter for held in kept] == [1]


def test_names_choose(toy: Toy) -> None:
    wanted = [one.greedy(PROMPT, 4) for one in references(toy.model)]
    with BundleLLM(toy.bundle) as llm:
        assert [adapter.name for adapter in llm.bundle.adapters] == list(NAMES)
        assert [(a.rank, a.modules) for a in llm.bundle.adapters][2] == (3, ["embed_tokens", "lm_head"])
        built = llm.generate([PROMPT] * 4, greedy(4), use_tqdm=False, lora=["wide", None, "loud", "quiet"])
        assert [list(output.outputs[0].token_ids) for output in built] == [wanted[a] for a in (3, 0, 1, 2)]
        plain = llm.generate([PROMPT], greedy(4), use_tqdm=False)
        assert list(plain[0].outputs[0].token_ids) == wanted[0]
        with pytest.raises(InputError, match=r"no adapter 'lout'; it has loud, quiet, wide"):
            llm.generate([PROMPT], greedy(4), lora="lout")
        with pytest.raises(InputError, match="2 names of adapters for 1 prompts"):
            llm.generate([PROMPT], greedy(4), lora=["loud", "wide"])


def test_drafts_are_verified_with_the_adapter(toys: dict[str, Toy], monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are what the adapter's model says, so that all of them hold."""
    toy = toys["fake:ragged"]
    wanted = references(toy.model)
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    with BundleLLM(toy.bundle, keep_steps=True, speculative_config=config) as llm:
        for number, name in enumerate([None, *NAMES]):
            drafted = partial(_guessed, wanted[number])
            monkeypatch.setattr(
                SequenceDrafter, "propose", lambda _, tokens, most, drafted=drafted: drafted(tokens, most)
            )
            built = llm.generate([PROMPT], greedy(8), use_tqdm=False, lora=name)
            assert list(built[0].outputs[0].token_ids) == wanted[number].greedy(PROMPT, 8)
            assert sum(record.drafted for record in llm.records) == sum(r.accepted for r in llm.records) > 0


def _guessed(reference: ToyReference, tokens: Sequence[int], most: int) -> list[int]:
    return reference.greedy(list(tokens), min(most, 3))


def test_choices_of_a_request_share_its_adapter(toy: Toy) -> None:
    wanted = references(toy.model)[2].greedy(PROMPT, 3)
    params = SamplingParams(n=3, max_tokens=3, top_k=1, ignore_eos=True)
    with BundleLLM(toy.bundle) as llm:
        (built,) = llm.generate([PROMPT], params, use_tqdm=False, lora="quiet")
    assert [list(choice.token_ids) for choice in built.outputs] == [wanted] * 3


def test_prompts_are_not_computed_elsewhere(toy: Toy) -> None:
    bundle = Bundle.open(toy.bundle)
    executor = open_executor(bundle, SEQS)
    with pytest.raises(InputError, match="requests select a LoRA adapter"):
        BatchedCore(bundle.plan, executor, VOCAB, prefiller=object())  # type: ignore[arg-type]
    executor.close()


def test_a_bundle_without_adapters_says_so(tmp_path: Path) -> None:
    built = Toy.make(tmp_path)
    built.compile()
    with BundleLLM(built.bundle) as llm, pytest.raises(InputError, match=r"it has none .*--lora-modules NAME=ADAPTER"):
        llm.generate([PROMPT], greedy(1), lora="loud")


def test_an_adapter_that_reaches_another_row_is_not_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that gives every row the adapter of the first."""

    def first_of_all(program, *given):  # type: ignore[no-untyped-def]
        return replace(program, adapters=program.adapters * 0 + program.adapters[0]).replay(*given)

    use(monkeypatch, replay=first_of_all)
    with pytest.raises(VerificationError, match="disagree with the reference model"):
        toy_with_adapters(tmp_path, verify="all")


def test_an_adapter_that_is_ignored_is_not_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, replay=lambda program, *given: replace(program, adapters=None).replay(*given))
    with pytest.raises(VerificationError, match="disagree with the reference model"):
        toy_with_adapters(tmp_path, verify="all")


@pytest.mark.parametrize(
    "adapters",
    [[], "x", [{"name": "a"}], [{"name": "a", "root": "a", "rank": "2", "modules": []}],
     [{"name": "a", "root": "a", "rank": 2, "modules": []}] * 3],
    ids=["none", "no list", "no facts", "no rank", "one name"],
)  # fmt: skip
def test_a_manifest_of_other_adapters_is_refused(toys: dict[str, Toy], tmp_path: Path, adapters: object) -> None:
    bundle = Path(copytree(toys["fake"].bundle, tmp_path / "bundle"))
    edit_manifest(bundle, lambda manifest: manifest["model"].update(adapters=adapters))
    with pytest.raises(ArtifactError, match="adapters"), BundleLLM(bundle) as llm:
        llm.generate([PROMPT], greedy(1), lora="loud" if adapters else None)
