"""Mutants change one token of code, and no text, type or set-up."""

from __future__ import annotations

from pathlib import Path

import pytest

import llmc.buckets.coverage
from scripts.mutants import mutants_of


def changes(source: str) -> set[str]:
    """Each mutated line of a module of which one line differs."""
    found = set()
    for mutant in mutants_of(source.encode()):
        assert mutant.is_valid(source.encode())
        mutated = mutant.applied(source.encode()).decode()
        lines = zip(source.split("\n"), mutated.split("\n"), strict=True)
        [(number, changed)] = [(at, after) for at, (before, after) in enumerate(lines, 1) if before != after]
        assert number == mutant.line
        found.add(changed.strip())
    return found


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a < b", {"a <= b"}),
        ("a >= b > c", {"a > b > c", "a >= b >= c"}),
        ("a == (b)", {"a != (b)"}),
        ("(a) in b", {"(a) not in b"}),
        ("a not in b", {"a in b"}),
        ("a is not b", {"a is b"}),
        ("a + b - c", {"a - b - c", "a + b + c"}),
        ("a // b", {"a * b"}),
        ("a **= b", {"a *= b"}),
        ("a @ b", set()),
        ("a and b or c", {"a or b or c", "a and b and c"}),
        ("not a", {"a"}),
        ("f(7, 0.5, True)", {"f(8, 0.5, True)", "f(7, 1.5, True)", "f(7, 0.5, False)"}),
        ("not(a)", {"(a)"}),
        ("é = 'Σ…', a < b", {"é = 'Σ…', a <= b"}),
    ],
)
def test_each_kind_of_operator_and_constant(line: str, expected: set[str]) -> None:
    assert changes(line) == expected


def test_branches_and_return_values() -> None:
    source = "def f(a):\n    if a:\n        return a\n    while a:\n        pass\n    return None\n"
    assert changes(source) == {"if False:", "return None", "while False:"}


@pytest.mark.parametrize(
    "source",
    [
        '"""Sizes 1 < 2."""',
        "def f(a: Literal[1], *b: Literal[2]) -> Literal[3]:\n    '''Adds 1 + 1.'''",
        "a: Literal[1]",
        "A: TypeAlias = Literal[1]",
        "@cache(1)\n@dataclass(frozen=True)\nclass A:\n    '''Is 1.'''",
        "if TYPE_CHECKING:\n    a = 1",
        "if __name__ == '__main__':\n    a(1)",
        "raise E(f'{a + 1} is over 2', a < 1)",
        "f'{a + 1}'",
        "_log.info('%d', 1)",
        "zip(a, b, strict=True)",
        "__all__ = ['a'] + b",
        "return_value = None",
    ],
)
def test_words_types_and_set_up_have_no_mutants(source: str) -> None:
    assert changes(source) == set()


def test_an_operator_beside_a_comment_has_no_mutant() -> None:
    assert mutants_of(b"(a  # < or >\n < b)") == []


def test_mutants_of_llmc_are_valid() -> None:
    source = Path(llmc.buckets.coverage.__file__).read_bytes()
    mutants = mutants_of(source)
    assert {mutant.kind for mutant in mutants} >= {"comparison", "arithmetic", "constant", "branch", "return"}
    assert [mutant for mutant in mutants if not mutant.is_valid(source)] == []
