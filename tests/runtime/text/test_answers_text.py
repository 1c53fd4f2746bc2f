"""An answer's text is what it adds to its prompt's, in every kind of tokenizer: streamed, at once and echoed."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.runtime.engine.requests import text_of
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.llm import BundleLLM
from llmc.runtime.text.tokenizer import StreamDetokenizer, Tokenizer
from tests.runtime.text.tokenizers_at_work import END, KINDS, LINES, backend
from tests.server.live import Live
from tests.tiers import default_cases
from tests.toy import Toy

PROMPTS = ["The capital of France is", "Don't panic:", "Größe, Straße", "the river there", "is "]


@pytest.mark.parametrize("kind", KINDS)
def test_every_line_cut_anywhere_goes_on_as_it_was_written(kind: str) -> None:
    reference = backend(kind)
    tokenizer = Tokenizer(reference.to_str().encode())
    spaces = 0
    for line in LINES:
        ids = reference.encode(line).ids
        whole = reference.decode(ids)
        for cut in range(1, len(ids)):
            before = reference.decode(ids[:cut])
            if not whole.startswith(before) or before.endswith("\ufffd"):
                continue  # in the middle of a character
            stream = StreamDetokenizer(tokenizer, prompt=ids[:cut])
            added = "".join([stream.feed(token) for token in ids[cut:]]) + stream.flush()
            assert added == whole[len(before) :], (line, cut)
            spaces += added.startswith(" ")
    assert spaces > 20


@pytest.fixture(scope="module", params=KINDS)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with this tokenizer."""
    tokenizer = backend(request.param)
    size = tokenizer.get_vocab_size()
    toy = Toy.make(tmp_path_factory.mktemp("toy"), vocab=size, eos_token_id=tokenizer.token_to_id(END))
    (toy.model / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    toy.compile(verify="none")
    return toy.bundle


@default_cases(2)
def test_streamed_at_once_and_echoed_texts_are_the_reference_tokenizer_s(bundle: Path) -> None:
    params = [SamplingParams(max_tokens=12, temperature=2.0, seed=s, ignore_eos=True) for s, _ in enumerate(PROMPTS)]
    with BundleLLM(bundle) as llm:
        tokenizer = llm.bundle.tokenizer
        outputs = llm.generate(PROMPTS, params)
        streamed = [""] * len(PROMPTS)
        for index, update, _ in llm.stream(PROMPTS, params):
            streamed[index] += update.text
    wanted = []
    for output in outputs:
        requested = list(output.prompt_token_ids)
        before = tokenizer.decode(requested)
        whole = tokenizer.decode([*requested, *output.outputs[0].token_ids])
        assert whole.startswith(before)
        wanted.append(whole[len(before) :])
    assert [o.outputs[0].text for o in outputs] == streamed == wanted
    with Live(bundle) as server:
        server.ready()
        for seed, prompt in enumerate(PROMPTS):
            how = {"max_tokens": 12, "temperature": 2.0, "seed": seed, "ignore_eos": True, "prompt": prompt}
            for echo in (True, False):
                text = prompt * echo + wanted[seed]
                assert server.complete(**how, echo=echo).json["choices"][0]["text"] == text
                chunks = server.complete(**how, echo=echo, stream=True).chunks
                assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == text


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_s_own_text_is_that_of_a_word_in_a_text(kind: str) -> None:
    text = text_of(Tokenizer(backend(kind).to_str().encode()))
    assert text is not None
    texts = [text(token) for token in backend(kind).encode("the capital", add_special_tokens=False).ids]
    assert "".join(texts).lstrip() == "the capital" and texts.count("") <= 1
