"""Rendering of the templates beside this file: `[[ value | filter ]]`, `[% statement %]` and `[# comment #]`.

These delimiters are none of the languages', among which GitHub and Helm write `{{ }}` themselves. A value without a
filter of quoting.py is an error, so that none goes in unquoted; whole numbers alone need none.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from llmc.deploy.quoting import FILTERS, Written


def render(template: str, values: Mapping[str, Any]) -> str:
    """The text of `templates/TEMPLATE.j2` with these values."""
    return _environment().get_template(f"{template}.j2").render(values)


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("llmc.deploy"), undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True,
        autoescape=False,  # noqa: S701 - _finished is to these languages what it is to HTML
        lstrip_blocks=True, finalize=_finished, block_start_string="[%", block_end_string="%]",
        variable_start_string="[[", variable_end_string="]]", comment_start_string="[#", comment_end_string="#]",
    )  # fmt: skip
    made.filters.update(FILTERS)
    return made


def _finished(value: object) -> object:
    if isinstance(value, Written) or type(value) is int:
        return value
    raise TypeError(f"a template writes {value!r:.80} without a filter")
