"""LoRA adapters that requests choose, on the fake device, whose embedding and head an adapter changes: every token
against the model that its adapter is merged into."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmc.errors import ArtifactError, InputError, VerificationError
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.engine import Engine
from llmc.runtime.engine.sampling import SamplingParams
from llmc.runtime.executors import open_executor
from llmc.runtime.llm import BundleLLM
from llmc.testing.toy import VOCAB
from tests.adapters import NAMES, references, toy_with_adapters
from tests.devices import use
from tests.manifests import edit_manifest
from tests.toy import Toy

SEQS, PROMPT = 4, [3, 5, 9, 20, 7, 1, 8, 8]


@pytest.fixture(scope="module", params=["fake", "fake exact", "fake:ragged", "fake:paged=72"])
def toy(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Toy:
    device, _, exact = request.param.partition(" ")
    return toy_with_adapters(
        tmp_path_factory.mktemp("toy"), device=device, specialise=None if device == "fake" and not exact else False
    )


@pytest.fixture
def engine(toy: Toy) -> Iterator[Engine]:
    bundle = Bundle.open(toy.bundle)
    executor = open_executor(bundle, SEQS + 2)
    yield Engine(bundle.plan, executor, VOCAB, min_prefix=2)
    executor.close()


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)


def test_rows_of_a_batch_have_adapters_of_their_own(toy: Toy, engine: Engine) -> None:
    wanted = references(toy.model)
    prompts = [PROMPT, PROMPT[:3], [4, 4], PROMPT[2:], [9], PROMPT]
    adapters = [1, 0, 3, 2, 3, 3]
    made = engine.complete(prompts, [greedy(5)] * len(prompts), adapters)
    assert made == [wanted[a].greedy(p, 5) for a, p in zip(adapters, prompts, strict=True)]


def test_what_was_cached_with_another_adapter_is_not_reused(toy: Toy, engine: Engine) -> None:
    """Neither what an ended sequence left, nor what one that runs, or comes in the same step, computes."""
    wanted = [one.greedy(PROMPT, 4) for one in references(toy.model)]
    assert len({tuple(tokens) for tokens in wanted}) == 4, "each adapter has an answer of its own"
    for adapter in (1, 0, 2, 1, 3, 0):
        assert engine.complete([PROMPT], [greedy(4)], [adapter]) == [wanted[adapter]]
    assert engine.complete([PROMPT] * 4, [greedy(4)] * 4, [2, 3, 0, 1]) == [wanted[a] for a in (2, 3, 0, 1)]
    engine.add(100, PROMPT, engine.sampler(PROMPT, greedy(4)), adapter=2)
    admitted = [outcome.admitted for outcome in iter(engine.step, None) if outcome and outcome.admitted]
    assert admitted == [((100, len(PROMPT) - 1),)], "what its own adapter left is"


def test_a_failed_sequence_takes_nothing_of_other_adapters(toy: Toy, engine: Engine) -> None:
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
        made = llm.generate([PROMPT] * 4, greedy(4), use_tqdm=False, lora=["wide", None, "loud", "quiet"])
        assert [list(output.outputs[0].token_ids) for output in made] == [wanted[a] for a in (3, 0, 1, 2)]
        plain = llm.generate([PROMPT], greedy(4), use_tqdm=False)
        assert list(plain[0].outputs[0].token_ids) == wanted[0]
        with pytest.raises(InputError, match=r"no adapter 'lout'; it has loud, quiet, wide"):
            llm.generate([PROMPT], greedy(4), lora="lout")
        with pytest.raises(InputError, match="2 names of adapters for 1 prompts"):
            llm.generate([PROMPT], greedy(4), lora=["loud", "wide"])


def test_a_bundle_without_adapters_says_so(tmp_path: Path) -> None:
    made = Toy.make(tmp_path)
    made.compile()
    with BundleLLM(made.bundle) as llm, pytest.raises(InputError, match=r"it has none .*--lora-modules NAME=ADAPTER"):
        llm.generate([PROMPT], greedy(1), lora="loud")


def test_an_adapter_that_reaches_another_row_is_not_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that gives every row the adapter of the first."""
    from dataclasses import replace

    def first_of_all(program, *given):  # type: ignore[no-untyped-def]
        return replace(program, adapters=program.adapters * 0 + program.adapters[0]).replay(*given)

    use(monkeypatch, replay=first_of_all)
    with pytest.raises(VerificationError, match="disagree with the reference model"):
        toy_with_adapters(tmp_path)


def test_an_adapter_that_is_ignored_is_not_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    use(monkeypatch, replay=lambda program, *given: replace(program, adapters=None).replay(*given))
    with pytest.raises(VerificationError, match="disagree with the reference model"):
        toy_with_adapters(tmp_path)


@pytest.mark.parametrize(
    "adapters",
    [[], "x", [{"name": "a"}], [{"name": "a", "root": "a", "rank": "2", "modules": []}],
     [{"name": "a", "root": "a", "rank": 2, "modules": []}] * 3],
    ids=["none", "no list", "no facts", "no rank", "one name"],
)  # fmt: skip
def test_a_manifest_of_other_adapters_is_refused(tmp_path: Path, adapters: object) -> None:
    made = toy_with_adapters(tmp_path)
    edit_manifest(made.bundle, lambda manifest: manifest["model"].update(adapters=adapters))
    with pytest.raises(ArtifactError, match="adapters"), BundleLLM(made.bundle) as llm:
        llm.generate([PROMPT], greedy(1), lora="loud" if adapters else None)
