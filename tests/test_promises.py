"""The list of ways to break promises fits the code, so that `make promises`, which takes long, works at any time."""

from __future__ import annotations

import re

import pytest

from scripts.check_promises import PACKAGE, ROOT, TESTS, Mutation, read_mutations

MUTATIONS = read_mutations()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.promise} {m.what}")
def test_what_a_mutation_changes_is_in_the_code_once_and_what_should_notice_is_there(mutation: Mutation) -> None:
    assert (ROOT / PACKAGE / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.tests
    for test in mutation.tests:
        file, *names = test.split("[")[0].split("::")
        path = ROOT / TESTS / file
        assert path.exists(), test
        for name in names:
            assert re.search(rf"^\s*(?:def|class) {name}\b", path.read_text(), re.MULTILINE), test


def test_each_promise_has_a_way_to_be_broken() -> None:
    promised = re.findall(r"^\| (P\d+) \|", (ROOT / "docs" / "guarantees.md").read_text(), re.MULTILINE)
    assert promised
    assert set(promised) == {mutation.promise for mutation in MUTATIONS}


def test_each_test_that_the_threat_model_names_is_there() -> None:
    rows = [line for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("| ")]
    tests = {name for row in rows for name in re.findall(r"tests/[\w/]+(?:\.py)?", row)}
    assert len(tests) > 20
    assert [name for name in sorted(tests) if not (ROOT / name).exists()] == []
