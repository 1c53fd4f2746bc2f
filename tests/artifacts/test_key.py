from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import ABSENT, SHOWN, Difference, Key, canonical_json, describe

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


@given(COMPONENTS, COMPONENTS)
def test_differences_are_reported_in_one_line_however_many_there_are(a: dict[str, str], b: dict[str, str]) -> None:
    found = Key("k", a).explain(Key("k", b))
    reported = describe(found)
    assert "\n" not in reported
    assert reported.endswith(f"and {len(found) - SHOWN} more") == (len(found) > SHOWN)
    assert (reported == "") == (not found)


@pytest.mark.parametrize(
    ("mine", "theirs", "reported"),
    [
        ("1.31.1", "1.30.0", "x: 1.30.0 → 1.31.1"),
        (16, None, "x: null → 16"),
        (True, ABSENT, "x: (absent) → true"),
        ("", "a\nb", 'x: "a\\nb" → ""'),
        (digest_bytes(b"a"), digest_bytes(b"b"), "x: 3e23e8160039 → ca978112ca1b"),
        ("x86_64 avx avx2", "x86_64 avx amx_tile", "x: -amx_tile +avx2"),
        ("a" * 50, "b", f"x: b → {'a' * 39}…"),
    ],
)
def test_a_difference_is_reported_from_theirs_to_mine(mine: str, theirs: str, reported: str) -> None:
    assert describe([Difference("x", mine, theirs)]) == reported


def test_what_people_can_read_is_reported_before_digests() -> None:
    mine = {f"a{i}": digest_bytes(b"%d" % i) for i in range(5)} | {"toolchain.torch": "2", "option.dtype": "f32"}
    theirs = {name: digest_bytes(value.encode()) for name, value in mine.items()} | {"toolchain.torch": "1"}
    theirs["option.dtype"] = "bf16"
    reported = describe(Key("k", mine).explain(Key("k", theirs)))
    assert reported.startswith("option.dtype: bf16 → f32, toolchain.torch: 1 → 2, a0: ")
    assert reported.endswith(", and 3 more")
