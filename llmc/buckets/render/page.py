"""Self-contained HTML pages, and fragments for notebooks: tables, grids and drawings.

Everything is inline and nothing is fetched; all text is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.errors import InputError
from llmc.files import write_bytes
from llmc.platforms import missing

if TYPE_CHECKING:
    from llmc.buckets.render.figure import Plot

Cells = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table: (name, right-aligned) of its columns, its rows, and a note on omitted rows."""

    heading: str
    header: tuple[tuple[str, bool], ...]
    rows: Sequence[Cells]
    note: str = ""
    sortable: bool = False


@dataclass(frozen=True)
class Section:
    """Tables and notes under one heading."""

    heading: str
    tables: list[Table]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Grid:
    """A number at each of `rows` × `columns`, empty where it is 0; `shades`, 0 to 1, say how dark each is drawn."""

    heading: str
    corner: str
    columns: Sequence[str]
    rows: Sequence[str]
    numbers: Sequence[Sequence[int]]
    shades: Sequence[Sequence[float]]
    note: str = ""


def columns(names: Sequence[str], left: int) -> tuple[tuple[str, bool], ...]:
    """Return `names` as a header, the first `left` columns aligned to the left."""
    return tuple((name, index >= left) for index, name in enumerate(names))


def counts(*values: int) -> Cells:
    """Return numbers as cell texts."""
    return tuple(f"{value:,}" for value in values)


_TABLE = """\
{%- macro table(header, rows, kind="") %}
<div class="scroll"><table{% if kind %} class="{{ kind }}"{% endif %}>
<thead><tr>
{%- for name, right in header %}<th{% if right %} class="n"{% endif %}>{{ name }}</th>{% endfor -%}
</tr></thead>
<tbody>
{%- for row in rows %}
<tr>{% for cell in row %}<td{% if header[loop.index0][1] %} class="n"{% endif %}>{{ cell }}</td>{% endfor %}</tr>
{%- endfor %}
</tbody></table></div>
{%- endmacro -%}
"""

PAGE = (
    _TABLE
    + """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width">
<title>{{ title }}</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; color: #24292f; background: #fff; max-width: 75rem; margin: 1.5rem auto;
 padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem; }
figure { margin: 0; } figure svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; margin: .4rem 0; font-size: .85rem; }
th, td { overflow-wrap: break-word; padding: .15rem .7rem; text-align: left; border-bottom: 1px solid #d8dee4; }
th { background: #f3f5f7; position: sticky; top: 0; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
table.sortable th { cursor: pointer; }
.scroll { max-height: 28rem; overflow: auto; display: inline-block; max-width: 100%; }
p.note { color: #57606a; margin: .3rem 0; }
@media print { .scroll { max-height: none; overflow: visible; } }
</style>
</head>
<body>
<h1>{{ title }}</h1>
{%- for heading, drawing in drawings %}
<h2>{{ heading }}</h2>
<figure>{{ drawing | safe }}</figure>
{%- endfor %}
{%- for section in sections %}
<h2>{{ section.heading }}</h2>
{%- for part in section.tables %}
<h3>{{ part.heading }}</h3>
{{- table(part.header, part.rows, "sortable" if part.sortable else "") }}
{%- if part.note %}
<p class="note">{{ part.note }}</p>
{%- endif %}
{%- endfor %}
{%- if section.notes %}
<h3>Notes</h3>
<ul>
{%- for note in section.notes %}
<li>{{ note }}</li>
{%- endfor %}
</ul>
{%- endif %}
{%- endfor %}
<script>
document.querySelectorAll("table.sortable").forEach(function (table) {
  var compare = function (a, b, column) {
    var texts = [a, b].map(function (row) { return row.cells[column].textContent; });
    var numbers = texts.map(function (text) {
      return /^-?[\\d.,]+%?$/.test(text) ? parseFloat(text.replace(/,/g, "")) : NaN;
    });
    if (numbers.every(isNaN)) return texts[1].localeCompare(texts[0]);
    return (isNaN(numbers[0]) ? -1 : numbers[0]) - (isNaN(numbers[1]) ? -1 : numbers[1]);
  };
  table.querySelectorAll("th").forEach(function (head, column) {
    var sign = 1;
    head.addEventListener("click", function () {
      var body = table.tBodies[0];
      sign = -sign;
      Array.from(body.rows)
        .sort(function (a, b) { return sign * compare(a, b, column); })
        .forEach(function (row) { body.appendChild(row); });
    });
  });
});
</script>
</body>
</html>
"""
)


# transparent colours work on light and dark notebooks
FRAGMENT = (
    _TABLE
    + """<div class="llmc">
<style>
.llmc { font-size: .9em; }
.llmc .scroll { max-height: 24em; overflow: auto; max-width: 100%; }
.llmc table { border-collapse: collapse; margin: .2em 0 .4em; }
.llmc th, .llmc td { padding: .1em .6em; text-align: left; border-bottom: 1px solid rgba(128, 128, 128, .3); }
.llmc td.n, .llmc th.n { text-align: right; font-variant-numeric: tabular-nums; }
.llmc p { margin: .3em 0; } .llmc p.note { opacity: .7; }
</style>
<p><strong>{{ title }}</strong></p>
{%- for fact in facts %}
<p>{{ fact }}</p>
{%- endfor %}
{%- for part in parts %}
{%- if part.heading %}<p>{{ part.heading }}</p>{% endif %}
{%- if part.numbers is defined %}
<div class="scroll"><table>
<thead><tr><th>{{ part.corner }}</th>
{%- for name in part.columns %}<th class="n">{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{%- for name in part.rows %}
{%- set row = loop.index0 %}
<tr><th class="n">{{ name }}</th>
{%- for number in part.numbers[row] %}<td class="n"
{%- if number %} style="background: rgba(76, 132, 182, {{ part.shades[row][loop.index0] | round(2) }})"{% endif %}>
{{- number or "" }}</td>{% endfor %}</tr>
{%- endfor %}
</tbody></table></div>
{%- else %}
{{- table(part.header, part.rows) }}
{%- endif %}
{%- if part.note %}
<p class="note">{{ part.note }}</p>
{%- endif %}
{%- endfor %}
</div>
"""
)

SUFFIXES = (".png", ".html")


def check(path: Path) -> None:
    """Raise InputError for a file name without a plot suffix, DeviceError without matplotlib."""
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"cannot draw to {path}: give a file name that ends in {' or '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401 - only checks that it is installed; drawing code imports what it needs
    except ImportError:
        raise missing("matplotlib") from None


def page(title: str, drawings: Sequence[tuple[str, str]], sections: Sequence[Section]) -> str:
    """Return a page; `drawings` are (heading, svg element) and are not escaped."""
    return _rendered(PAGE, title=title, drawings=drawings, sections=sections)


def fragment(title: str, facts: Sequence[str], parts: Sequence[Table | Grid]) -> str:
    """Return an object's HTML for notebooks (`_repr_html_`): its title, one fact per line, then tables and grids."""
    return _rendered(FRAGMENT, title=title, facts=facts, parts=parts)


def _rendered(template: str, **values: object) -> str:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(template).render(values)


def write(path: Path, title: str, plots: Sequence[Plot], sections: Callable[[], Sequence[Section]]) -> None:
    """Write `plots` to `path` atomically: as a .png picture, or as an .html page with `sections` below them.

    Equal arguments give equal bytes. Raises InputError when the file cannot be written.
    """
    from llmc.buckets.render.figure import png, svg

    if path.suffix.lower() == ".png":
        content = png(title, plots)
    else:
        drawings = [(plot.heading, svg(plot, f"p{index}-")) for index, plot in enumerate(plots, 1)]
        content = page(title, drawings, sections()).encode()
    write_bytes(path, content, "plots")
