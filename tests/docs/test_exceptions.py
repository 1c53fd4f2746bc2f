"""What of the documents no test runs: every rule is needed, and every other call is of a document that is rehearsed."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.docs.commands import DOCUMENTS, ROOT, shown
from tests.docs.exceptions import EXCEPTIONS, PAGES, all_calls, why_not
from tests.docs.groups import GROUPS
from tests.docs.scenes import SCENES, unit_of
from tests.docs.stand_ins import BROUGHT


@pytest.mark.parametrize("reason", EXCEPTIONS)
def test_every_exception_is_that_of_a_call(reason: str) -> None:
    assert any(EXCEPTIONS[reason](one, call) for one, call in all_calls())


def test_few_calls_are_exceptions() -> None:
    reasons = Counter(why_not(one, call) for one, call in all_calls())
    own = sum(count for reason, count in reasons.items() if reason and not reason.startswith("runs as a page"))
    assert own < 15 and reasons[None] > 250, reasons


def test_every_call_is_in_the_group_of_one_file_of_tests() -> None:
    listed = Counter(name for group in GROUPS for name in group)
    assert set(listed.values()) == {1}
    assert set(listed) == {one.document.relative_to(ROOT).as_posix() for one, _ in all_calls()}


def test_every_group_has_its_file_of_tests() -> None:
    text = "".join(path.read_text() for path in (ROOT / "tests" / "docs").glob("test_rehearsal_of_*.py"))
    assert text.count('@pytest.mark.parametrize("unit", units(') == len(GROUPS)


def test_every_scene_and_page_is_of_a_document() -> None:
    assert {unit_of(one) for one, _ in all_calls()} >= set(SCENES)
    assert {document.relative_to(ROOT).as_posix() for document in DOCUMENTS} >= {f"docs/{name}.md" for name in PAGES}


def test_every_part_that_a_scene_waits_for_is_of_a_call() -> None:
    for name, scene in SCENES.items():
        lines = [one.line for one, call in all_calls() if unit_of(one) == name and why_not(one, call) is None]
        for part in (*scene.anew, *scene.host):
            assert any(part in " ".join(line.split()) for line in lines), (name, part)


def test_every_stand_in_is_named_somewhere() -> None:
    words = {
        name.removeprefix("./").removeprefix("~/").removeprefix("/")
        for document in DOCUMENTS
        for one in shown(document)
        for word in one.line.split()
        for name in (word, *word.split("="))
    }
    assert not {name for name in BROUGHT if name not in words}
