"""A bundle's tokenizer, whatever it does with a text, costs that text alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llmc.compiler import text
from llmc.errors import ArtifactError, CheckpointError
from llmc.runtime.bundle import Bundle
from llmc.runtime.confined.limits import ChildLimits
from llmc.runtime.text import tokenizer
from llmc.runtime.text.bounds import Bounds
from llmc.server import loading
from llmc.testing import toy
from tests.runtime.text.test_bounds import DOUBLING, split, with_steps
from tests.server.live import Call, Live, toy_bundle
from tests.server.test_hostile_grammars import HEALTHY_S, Health
from tests.server.test_swap import refused, serving, swap
from tests.tiers import full
from tests.toy import Toy

LIMITS = ChildLimits(seconds=0.3, memory_bytes=256 << 20, workers=1)
BACKTRACKS = "a" * 60_000 + "ddc"


def built_with(tokenizer_json: bytes, folder: Path, patch: pytest.MonkeyPatch) -> Path:
    with patch.context() as within:
        within.setattr(toy, "tokenizer_json", tokenizer_json.decode)
        return toy_bundle(folder)


@pytest.fixture
def backtracking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    """A server whose tokenizer takes time in proportion to the square of some texts."""
    bundle = built_with(with_steps(pre_tokenizer=split("a*[^a]c")), tmp_path, monkeypatch)
    monkeypatch.setattr(loading, "ConfinedEncoder", partial(loading.ConfinedEncoder, limits=LIMITS))
    with Live(bundle) as live:
        yield live.ready()


def test_a_text_that_takes_too_long_is_a_400_and_all_else_goes_on(backtracking: Live) -> None:
    whole = backtracking.complete(prompt="hi").json
    assert whole["usage"]["prompt_tokens"] == 2
    with Health(backtracking) as health:
        call = Call(lambda: backtracking.complete(prompt=BACKTRACKS, truncate_prompt_tokens=4))
        stream = backtracking.complete(prompt=[1, 2], stream=True, max_tokens=20)
        assert stream.chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert call.answer.status == 400
        assert "the text cannot be tokenised: it takes more than 0.3 s" in call.answer.json["error"]["message"]
        assert backtracking.complete(prompt="hi").json["choices"] == whole["choices"]
    assert health.worst < HEALTHY_S


@pytest.fixture
def growing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle that no check of a compile has seen, whose tokenizer makes 2 kB of "@"."""
    with monkeypatch.context() as patch:
        patch.setattr(text, "require_sound", lambda _: None)
        patch.setattr(tokenizer, "bounds_of", lambda _: Bounds(4, True))
        return built_with(with_steps(normalizer=DOUBLING), tmp_path, monkeypatch)


def test_a_bundle_whose_tokenizer_grows_texts_is_not_served(growing: Path) -> None:
    with pytest.raises(ArtifactError, match=r"tokenizer\.json is refused: its normalizer makes more than 1024 bytes"):
        Bundle.open(growing).tokenizer.encode("hi")
    with Live(growing) as live, pytest.raises(AssertionError, match="its normalizer makes more than 1024 bytes"):
        live.ready()


def test_it_is_not_swapped_in_either(growing: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(toy_bundle(tmp_path_factory.mktemp("one")), allow_model_change=True) as live:
        answer = swap(live, growing)
        assert "its normalizer makes more than 1024 bytes" in refused(live, answer, answer.json["error"]["code"])


def hostile_when_read() -> bytes:
    """An added token that takes gigabytes when it is read."""
    document: dict[str, Any] = json.loads(with_steps(normalizer=DOUBLING))
    document["normalizer"]["normalizers"] *= 4
    (end,) = document["added_tokens"]
    document["added_tokens"].append({**end, "id": 300, "content": "@", "normalized": True, "special": False})
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (with_steps(normalizer=DOUBLING), r"tokenizer\.json is refused: its normalizer makes more than 1024 bytes"),
        pytest.param(hostile_when_read(), r"takes more than 30 s or 1536 MiB to read; use another", marks=full),
        (b'{"version": "1.0", "model": {}}', r"tokenizer\.json is damaged or of a newer format"),
        (b'{"version": "1.0", ', r"tokenizer\.json"),
    ],
    ids=["grows", "grows when it is read", "no tokenizer", "truncated"],
)
def test_a_checkpoint_whose_tokenizer_cannot_be_used_is_not_compiled(data: bytes, said: str, tmp_path: Path) -> None:
    built = Toy.make(tmp_path)
    (built.model / "tokenizer.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=said):
        built.compile()
    assert not built.bundle.exists()
    (built.model / "tokenizer.json").unlink()
    built.compile()
    assert not Bundle.open(built.bundle).has_tokenizer, "of a checkpoint without one"
