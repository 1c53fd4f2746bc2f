from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.artifacts.key import Key
from llmc.artifacts.third_party.base import MAX_FACTS, Fact, compare, flatten, merge, parse_facts, versions
from llmc.errors import InputError
from tests.tiers import examples

TEXT = st.text(max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)


def test_members_become_dotted_names() -> None:
    value = {"a": {"b": 1, "c": [1, 2]}, "d": True, "e": None, "f": [{"g": "h"}, "i"]}
    found = dict(flatten("x", value))
    assert found == {"x.a.b": "1", "x.a.c": "[1,2]", "x.d": "true", "x.e": "null", "x.f.0.g": "h", "x.f.1": "i"}


def test_several_values_of_a_name_are_one_fact_whatever_their_order() -> None:
    one = merge([Fact("rank", "rank_1_0"), Fact("rank", "rank_0_0"), Fact("rank", "rank_1_0")])
    assert one == {"rank": "rank_0_0 | rank_1_0"}


@examples(40)
@given(st.dictionaries(st.text(max_size=8), JSON, max_size=3))
def test_any_json_makes_facts_that_a_key_can_have(value: dict[str, object]) -> None:
    found = merge(flatten("config", value))
    Key("foreign-cache", found)
    assert found == merge(flatten("config", dict(reversed(value.items()))))


def test_a_long_value_is_its_digest() -> None:
    (value,) = merge([Fact("a", "x" * 5000)]).values()
    assert value.startswith("sha256:")


def test_facts_without_end_are_refused() -> None:
    with pytest.raises(InputError, match="more than 4000 key facts"):
        merge(Fact(str(number), "") for number in range(MAX_FACTS + 1))


@pytest.mark.parametrize("name", ["cache", "tree"])
def test_reserved_names(name: str) -> None:
    with pytest.raises(InputError, match=f"a fact cannot be called '{name}'"):
        merge([Fact(name, "x")])


def test_versions_of_what_is_installed_alone() -> None:
    found = merge(versions(["pytest", "no-such-package-here"]))
    assert found == {"version.pytest": pytest.__version__}
    assert not merge(versions(["no-such-package-here", "pytest"])), "pytest is of another environment, then"
    assert not merge(versions([]))


def test_given_facts() -> None:
    assert parse_facts(["a=b", "c=d=e", "f="], "--fact") == {"a": "b", "c": "d=e", "f": ""}
    for wrong in (["a"], ["=b"], ["a=b", "a=c"]):
        with pytest.raises(InputError, match="--fact"):
            parse_facts(wrong, "--fact")


PACKED = {
    "version.vllm": "0.24",
    "config.x.dtype": "bf16",
    "compiler.0.device.name": "H100",
    "path": "/a",
    "a.dtype": "x",
}
DECISIVE = ("version.*", "compiler*.device.name", "path")


def test_each_fact_that_differs_is_named_and_the_unknown_are_reported() -> None:
    found = compare(
        PACKED, DECISIVE, {"x.dtype": "f16"}, {"version.vllm": "0.25", "device.name": "H100", "a.dtype": "?"}
    )
    assert [str(item) for item in found.mismatches] == [
        "config.x.dtype is bf16 in the cache, f16 was expected",
        "version.vllm is 0.24 in the cache, 0.25 here",
    ]
    assert found.matching == ("compiler.0.device.name",)
    assert found.unchecked == ("path",)


def test_what_is_given_wins_over_what_is_found() -> None:
    assert not compare(PACKED, DECISIVE, {"version.vllm": "0.24"}, {"version.vllm": "0.25"}).mismatches


def test_a_name_that_is_not_carried_or_not_clear() -> None:
    with pytest.raises(InputError, match=r"carries no fact 'dtyp'; it has .*a\.dtype"):
        compare(PACKED, DECISIVE, {"dtyp": "x"}, {})
    with pytest.raises(InputError, match=r"'dtype' fits config.x.dtype, a.dtype; give more of the name"):
        compare(PACKED, DECISIVE, {"dtype": "x"}, {})
