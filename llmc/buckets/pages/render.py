"""Pages that stand on their own, and fragments that notebooks show: everything inline, all text escaped."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import Environment, StrictUndefined

from llmc.buckets.pages.tables import Grid, Section, Table
from llmc.buckets.pages.template import FRAGMENT, PAGE


def page(title: str, drawings: Sequence[tuple[str, str]], sections: Sequence[Section]) -> str:
    """A page; `drawings` are (heading, svg element), trusted as they are."""
    return _rendered(PAGE, title=title, drawings=drawings, sections=sections)


def fragment(title: str, facts: Sequence[str], parts: Sequence[Table | Grid]) -> str:
    """What a notebook shows of an object (`_repr_html_`): its title, facts in one line each, then tables and grids."""
    return _rendered(FRAGMENT, title=title, facts=facts, parts=parts)


def _rendered(template: str, **values: object) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(template).render(values)
