"""Configuration files: JSON and YAML are mappings of names to values, and nothing else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.errors import InputError
from llmc.integrations.arguments import config_flags, load_config

VALUES = st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers())


@given(st.dictionaries(st.text(), VALUES | st.dictionaries(st.text(), VALUES)))
def test_json_is_what_it_says(config: dict[str, object]) -> None:
    assert load_config(json.dumps(config), "c.json") == config


def test_yaml_is_read_too() -> None:
    assert load_config("a: 1\nb:\n  c: [1, 2]\n", "c.yaml") == {"a": 1, "b": {"c": [1, 2]}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a server's configuration is a mapping"),
        ("[1]", "a server's configuration is a mapping"),
        ("1: 2\n", "a server's configuration is a mapping"),
        ("a: [\n", "c: not valid YAML: .* line 2"),
        ("a: !!python/object/apply:os.system [ls]\n", "not valid YAML"),
        ("a: &x [1]\nb: [*x, *x]\n", r"c: YAML aliases \(\*name\) are not read"),
        ('{"a": ' * 100_000, "c: nested too deep"),
        ("a: 2026-99-99\n", "not valid YAML"),
    ],
)
def test_anything_else_is_an_error(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_config(text, "c")


def test_a_file_stands_for_flags() -> None:
    config = load_config("max_num_seqs: 8\nx: true\ny: false\nz: null\nl: [1, 2]\nm: {a: [1]}\nt: word\n", "c")
    assert config_flags(config) == {
        "--max-num-seqs": "8", "--x": "", "--y": "false", "--l": "1 2", "--m": '{"a": [1]}', "--t": "word",
    }  # fmt: skip
