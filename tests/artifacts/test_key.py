from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.artifacts.key import ABSENT, Key, canonical_json

NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12)
VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.text(st.characters(exclude_categories=["Cs"])))
COMPONENTS = st.dictionaries(NAMES, VALUES, max_size=6)


def test_the_digest_of_a_key_does_not_change_between_versions() -> None:
    key = Key("executable", {"toolchain.onnxruntime": "1.31.1", "batch": 4, "native": True, "note": None})
    assert key.digest == "sha256:e6ab3142f668458b716695362db657e35c24a7aa6fe6d611f136d66369d871a5"


@given(COMPONENTS, st.randoms())
def test_order_of_components_does_not_matter(components: dict[str, str], random: object) -> None:
    names = list(components)
    random.shuffle(names)  # type: ignore[attr-defined]
    shuffled = Key("k", {name: components[name] for name in names})
    assert shuffled == Key("k", components)
    assert hash(shuffled) == hash(Key("k", components))


@given(COMPONENTS, COMPONENTS)
def test_keys_are_equal_exactly_when_nothing_differs(a: dict[str, str], b: dict[str, str]) -> None:
    one, other = Key("k", a), Key("k", b)
    same = canonical_json(a) == canonical_json(b)
    assert (one.digest == other.digest) == same
    assert (one == other) == same
    assert (one.explain(other) == []) == same


@given(COMPONENTS, NAMES, VALUES)
def test_changing_adding_or_removing_one_component_changes_the_key_and_is_explained(
    components: dict[str, str], name: str, value: str
) -> None:
    base, changed = Key("k", components), Key("k", {**components, name: value})
    removed = Key("k", {other: found for other, found in components.items() if other != name})
    if base != changed:
        assert base.explain(changed) == [(name, components.get(name, ABSENT), value)]
    assert changed != removed
    assert changed.explain(removed) == [(name, value, ABSENT)]


@pytest.mark.parametrize(("a", "b"), [(1, True), (0, False), (1, "1"), (None, "None"), (None, False), ("", None)])
def test_values_that_python_confuses_are_kept_apart(a: str, b: str) -> None:
    one, other = Key("k", {"x": a}), Key("k", {"x": b})
    assert one != other
    assert one.explain(other) == [("x", a, b)]


def test_another_kind_is_another_key() -> None:
    assert Key("a", {}).explain(Key("b", {})) == [("kind", "a", "b")]


@pytest.mark.parametrize("value", [1.5, b"x", ["x"], {"x": 1}, object(), float("nan")])
def test_other_types_of_value_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match="'size'"):
        Key("k", {"size": value})  # type: ignore[dict-item]


def test_subclasses_are_refused_since_their_json_may_vary() -> None:
    class Name(str):
        pass

    with pytest.raises(TypeError, match="convert it"):
        Key("k", {"x": Name("a")})


@pytest.mark.parametrize("kind", ["", "A", "a/b", "..", ".", "a b", "é", "x" * 65, "a\n"])
def test_a_kind_must_be_good_as_a_folder_name(kind: str) -> None:
    with pytest.raises(ValueError, match="kind"):
        Key(kind, {})


@pytest.mark.parametrize("name", ["", "a b", "a\n", "é"])
def test_a_name_must_be_plain(name: str) -> None:
    with pytest.raises(ValueError, match="component"):
        Key("k", {name: 1})


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(ValueError, match="surrogates"):
        Key("k", {"x": "\ud83d\ude00"})


def test_a_key_does_not_change() -> None:
    components = {"x": 1}
    key = Key("k", components)
    components["x"] = 2
    assert key.components == {"x": 1}
    with pytest.raises(AttributeError):
        key.kind = "other"
    with pytest.raises(TypeError):
        key.components["x"] = 2  # type: ignore[index]


def test_a_key_survives_pickling_between_workers() -> None:
    key = Key("k", {"x": 1, "y": None})
    assert pickle.loads(pickle.dumps(key)) == key
    assert pickle.loads(pickle.dumps(ABSENT)) is ABSENT
