"""The jinja2 template of the HTML page: everything inline, nothing fetched."""

PAGE = """<!DOCTYPE html>
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
th, td { overflow-wrap: anywhere; padding: .15rem .7rem; text-align: left; border-bottom: 1px solid #d8dee4; }
th { background: #f3f5f7; position: sticky; top: 0; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
table.sortable th { cursor: pointer; }
.scroll { max-height: 28rem; overflow: auto; display: inline-block; max-width: 100%; }
p.note { color: #57606a; margin: .3rem 0; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
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
{%- endmacro %}
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
  var key = function (row, column) {
    var text = row.cells[column].textContent, number = parseFloat(text.replace(/[,%]/g, ""));
    return isNaN(number) ? -1 : number;
  };
  table.querySelectorAll("th").forEach(function (head, column) {
    var sign = 1;
    head.addEventListener("click", function () {
      var body = table.tBodies[0];
      sign = -sign;
      Array.from(body.rows)
        .sort(function (a, b) { return sign * (key(a, column) - key(b, column)); })
        .forEach(function (row) { body.appendChild(row); });
    });
  });
});
</script>
</body>
</html>
"""
