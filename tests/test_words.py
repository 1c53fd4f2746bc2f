"""The words of our own that the glossary replaced: none comes back into names, messages or documents."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.commands import DOCUMENTS, ROOT
from tests.tiers import default_cases, full

pytestmark = full  # make lint runs these tests

OF_NAMES = {
    "asked": "requested", "card": "gpu, accelerator", "cards": "gpus, accelerators", "codes": "quantized",
    "fade": "decay", "fades": "decays", "finisher": "on_target", "handover": "kv_transfer", "made": "built",
    "outer": "embed_lm_head", "place": "token slot, offset, index, location",
    "places": "token slots, offsets, indices, locations", "poison": "nan_fill", "poisoned": "nan_filled",
    "tells": "reports", "told": "reported", "waste": "padding", "wastes": "padding", "witness": "monitor",
    "witnesses": "monitors",
}  # fmt: skip
"""Part of a name → what it is called here."""
ALLOWED = {
    "connection_made",  # asyncio's
    "ModelCard",  # vLLM's and OpenAI's name of an entry of /v1/models
    "in_place", "in_place_of", "warn_in_place_of", "_require_in_place",
}  # fmt: skip
OF_TEXTS = {
    r"poison(s|ed|ing)?": "NaN fill", r"witness(es)?": "compilation monitor", r"dead buckets?": "unused bucket",
    r"foreign caches?": "third-party cache", r"prompt steps?": "prefill", r"answer steps?": "decode step",
    r"laid end to end": "packed", r"hand-?overs?": "KV transfer", r"contract-tested": "tested against mocks",
    r"no numbers?": "NaN", r"famil(y|ies) of models": "architecture", r"equal tokens": "top-1 agreement",
    r"exec to first token": "cold-start TTFT", r"time between tokens": "inter-token latency (ITL)",
}  # fmt: skip
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def names(path: Path) -> Iterator[tuple[int, str]]:
    """Every name in a source, with its line."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


def replaced(name: str) -> list[str]:
    """The parts of a name that the glossary replaced; a test's name may say "in the place of"."""
    parts = [part for part in map(str.lower, _PART.findall(name)) if part in OF_NAMES]
    sentence = name.startswith("test_")
    return [] if name in ALLOWED else [part for part in parts if not (sentence and part == "place")]


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """What a source may show to people: every string with a space, docstrings too, since some are the help."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


@default_cases("llmc")
@pytest.mark.parametrize("folder", ["llmc", "tests", "benchmarks", "scripts"])
def test_no_name_has_a_word_that_was_replaced(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}: say {', '.join(OF_NAMES[part] for part in parts)}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, name in names(path)
        if (parts := replaced(name))
    ]
    assert not found, "\n".join(found)


def test_no_string_or_document_has_one() -> None:
    wanted = {re.compile(rf"\b{words}\b", re.IGNORECASE): better for words, better in OF_TEXTS.items()}
    said = [
        *((path, line, text) for path in sorted((ROOT / "llmc").rglob("*.py")) for line, text in texts(path)),
        *((path, at, line) for path in DOCUMENTS for at, line in enumerate(path.read_text().splitlines(), 1)),
    ]
    found = [
        f"{path.relative_to(ROOT)}:{line} {match[0]!r}: say {better}"
        for path, line, text in said
        for pattern, better in wanted.items()
        if (match := pattern.search(text))
    ]
    assert not found, "\n".join(found)


def test_words_are_found_in_names_of_every_form() -> None:
    assert [replaced(name) for name in ("MADE", "made_by", "AsMade", "_told", "homemade", "in_place")] == [
        ["made"], ["made"], ["made"], ["told"], [], [],
    ]  # fmt: skip


def test_no_two_public_classes_share_a_name() -> None:
    """A reader who meets a class's name knows which one is meant. Aliases that are annotated as such count too."""
    where: dict[str, list[str]] = {}
    for path in sorted((ROOT / "llmc").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            is_alias = isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias"
            name = node.name if isinstance(node, ast.ClassDef) else ast.unparse(node.target) if is_alias else "_"
            if not name.startswith("_"):
                where.setdefault(name, []).append(path.relative_to(ROOT).as_posix())
    shared = {name: files for name, files in where.items() if len(files) > 1}
    assert not shared
