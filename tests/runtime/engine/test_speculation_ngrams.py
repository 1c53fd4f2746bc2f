"""Where the last tokens occurred before, and what followed."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.engine.speculation import CANDIDATES, NgramIndex
from tests.tiers import examples
from tests.timing import least_cpu_seconds

PROPERTY = examples(300, database=None, derandomize=True)


def looked_up(text: str, most: int = 4, shortest: int = 2, longest: int = 4) -> str:
    """One letter is one token."""
    tokens = array("q", map(ord, text))
    return "".join(map(chr, NgramIndex(shortest, longest).lookup(tokens, most)))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("the cat sat, the c", "at s"),
        ("abXY abZW ab", "ZW a"),  # of equal matches the latest
        ("1abX 2abY 1ab", "X 2a"),  # a longer match before a later one
        ("abcde", ""),
        ("a", ""),
        ("", ""),
        ("xa ya", ""),  # one equal token is less than two
        ("abab", "abab"),  # on beyond the end
        ("aaaa", "aaaa"),
    ],
)
def test_what_followed_the_longest_match_is_the_guess(text: str, found: str) -> None:
    assert looked_up(text) == found


def test_no_more_than_requested_and_none_for_none() -> None:
    assert looked_up("the cat sat, the c", most=2) == "at"
    assert looked_up("the cat sat, the c", most=0) == ""
    assert looked_up("the cat sat, the c", most=-3) == ""


@PROPERTY
@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 3), st.integers(0, 3), st.integers(1, 6))
def test_it_finds_what_a_search_finds_at_every_length(tokens: list[int], shortest: int, more: int, most: int) -> None:
    """One index that grows token by token, against a search through everything for each length."""
    longest = shortest + more
    index, grown = NgramIndex(shortest, longest), array("q")
    for token in tokens:
        grown.append(token)
        assert index.lookup(grown, most) == searched(grown.tolist(), shortest, longest, most)


def searched(tokens: list[int], shortest: int, longest: int, most: int) -> list[int]:
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        candidates = range(len(tokens) - 2, len(tokens) - 2 - 2 * len(tokens), -1)
        seen = 0
        for end in candidates:
            if end + 1 < shortest:
                break
            if tokens[end + 1 - shortest : end + 1] != tokens[len(tokens) - shortest :]:
                continue
            seen += 1
            if seen > CANDIDATES:
                break
            if end + 1 >= length and tokens[end + 1 - length : end + 1] == tokens[len(tokens) - length :]:
                then = list(tokens)
                for i in range(most):
                    then.append(then[end + 1 + i])
                return then[len(tokens) :]
    return []


def test_a_look_up_takes_microseconds_among_thousands_of_tokens() -> None:
    """Also where the last tokens occurred thousands of times."""
    for text in (array("q", [i * i % 977 for i in range(8192)]), array("q", [1, 2] * 4096)):
        index = NgramIndex(2, 4)
        index.lookup(text, 8)

        def step(text: array[int] = text, index: NgramIndex = index) -> None:
            text.append(1)
            index.lookup(text, 8)
            text.append(2)
            index.lookup(text, 8)

        assert least_cpu_seconds(step, rounds=100) / 2 < 100e-6
