"""Write the figures of benchmarks/results.toml into README.md, benchmarks/RESULTS.md and the charts of docs/images/.

The releases of tests/oracles/releases.txt go into docs/servers.md, the notations of tests/oracles/templates.json into
docs/serving.md.

    python -m scripts.results            write them
    python -m scripts.results --check    exit with 1 if a file differs from what would be written

In a document a table stands between `<!-- figures: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tomllib
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "benchmarks/RESULTS.md", "docs/servers.md", "docs/serving.md")
NOTATIONS = {
    "json": '`{"name": "f", "arguments": {"a": 1}}`, alone or in a list, between marks or not',
    "named": '`f`, a mark, `{"a": 1}`',
    "tags": "`f` and a tag for each argument",
    "python": "`[f(a=1)]`",
    "bare": "`f{a:1}`",
    "channels": "messages in channels (OpenAI's Harmony)",
    "": "calls are not found",
}
"""What a model writes, by the kind of its notation."""
IMAGES = "docs/images"
THEMES = {
    "light": {"back": "#ffffff", "text": "#1f2328", "faint": "#59636e", "before": "#afb8c1", "after": "#0969da"},
    "dark": {"back": "#0d1117", "text": "#f0f6fc", "faint": "#9198a1", "before": "#656c76", "after": "#4493f8"},
}
CHART_STEPS = ("decode, batch 1", "decode, batch 8", "prefill, 512 tokens")

_BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def faster(ratio: float) -> str:
    """A ratio of times, llmc/baseline, as the factor by which llmc is faster; below 1 it is slower."""
    return f"{1 / ratio:.2f}" if ratio > 0.8 else f"{1 / ratio:.1f}"


def _milliseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _headlines(data: dict[str, Any], document: str) -> str:
    page = "" if document.startswith("benchmarks/") else "benchmarks/RESULTS.md"
    rows = [[f"**{one['figure']}**", one["what"], f"[{one['how']}]({page}#{one['link']})"] for one in data["headlines"]]
    return _table(["figure", "what", "how it was found"], rows)


def _steps(data: dict[str, Any], weights: str) -> str:
    text = []
    for group in data["steps"]:
        if group["weights"] != weights:
            continue
        host = data["hosts"][group["host"]]
        text.append(f"\n**{host['name']}** ({host['detail']}), {group['weights']} weights:\n\n")
        rows = []
        for step, llmc, name, baseline, ratio, *bounds in group["rows"]:
            spread = f" ({faster(bounds[1])}–{faster(bounds[0])})" if bounds else ""
            rows.append(
                [step, f"{_milliseconds(llmc)} ms", f"{_milliseconds(baseline)} ms, {name}", f"{faster(ratio)}{spread}"]
            )
        text.append(_table(["step", "llmc", "fastest baseline", "llmc is faster by (range)"], rows))
    return "".join(text) + "\n"


def _padding(data: dict[str, Any]) -> str:
    rows = [
        [server, phase, str(graphs), f"{own}%", f"{planned}%"]
        for server, phase, graphs, own, planned in data["padding"]["rows"]
    ]
    return _table(["server", "padded", "graphs", "its own list", "planned from traffic"], rows)


def _compared() -> str:
    """Releases whose own functions agreed with llmc's rules, by package, and the day of the last comparison."""
    rows: dict[tuple[str, str], list[str]] = {}
    for line in (ROOT / "tests/oracles/releases.txt").read_text(encoding="utf-8").splitlines():
        if found := re.fullmatch(r"([\w-]+)==(\S+)  # (\S+)", line):
            rows.setdefault((found[1], found[3]), []).append(found[2])
    return _table(
        ["package", "releases", "compared"], [[name, ", ".join(those), day] for (name, day), those in rows.items()]
    )


def _notations() -> str:
    """Published chat templates by how their models write tool calls."""
    found = json.loads((ROOT / "tests/oracles/templates.json").read_text(encoding="utf-8"))
    rows = []
    for kind, example in NOTATIONS.items():
        names = sorted(
            {re.sub(r"^tool_chat_template_|^template_", "", name) for name, own in found.items() if own == kind}
        )
        rows.append([example, ", ".join(names)])
    return _table(["the model writes", "chat templates"], rows)


def _svg(title: str, height: int, parts: list[str], theme: dict[str, str]) -> str:
    """An SVG image 760 units wide."""
    size = f'viewBox="0 0 760 {height}" width="760" height="{height}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif" font-size="12" role="img">'
    )
    back = f'<rect width="760" height="{height}" fill="{theme["back"]}"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", back, *parts, "</svg>\n"])


def _text(x: float, y: float, text: str, colour: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}"{more}>{escape(text)}</text>'


def _heading(title: str, note: str, theme: dict[str, str]) -> list[str]:
    return [
        _text(10, 20, title, theme["text"], ' font-size="14" font-weight="600"'),
        _text(10, 38, note, theme["faint"]),
    ]


def _bars(title: str, note: str, rows: list[tuple[str, list[tuple[float, str, str]]]], theme: dict[str, str]) -> str:
    """Horizontal bars: a row is a label and its bars, each a value, its text and the colour's name."""
    label, width, height, gap = 300, 270, 15, 12
    most = max(value for _, group in rows for value, _, _ in group)
    parts = _heading(title, note, theme)
    y = 52
    for name, group in rows:
        parts.append(_text(label - 10, y + height * len(group) / 2 + 4, name, theme["text"], ' text-anchor="end"'))
        for value, text, colour in group:
            size = round(width * value / most, 1)
            parts.append(
                f'<rect x="{label}" y="{y}" width="{size}" height="{height - 2}" rx="2" fill="{theme[colour]}"/>'
            )
            parts.append(_text(label + size + 6, y + 11, text, theme["text"]))
            y += height
        y += gap
    return _svg(title, y, parts, theme)


def _pipeline(theme: dict[str, str]) -> str:
    """The way from traffic to a served request: four boxes, each with what it does."""
    boxes = [
        ("llmc plan", "buckets from traffic"),
        ("llmc compile", "every graph, in CI"),
        ("store or registry", "verified, signed bundle"),
        ("llmc serve", "pad, replay, no compile"),
    ]
    parts = []
    for i, (name, what) in enumerate(boxes):
        x = 10 + i * 188
        outline = f'fill="none" stroke="{theme["after"]}" stroke-width="1.5"'
        parts.append(f'<rect x="{x}" y="10" width="158" height="56" rx="8" {outline}/>')
        parts.append(_text(x + 79, 34, name, theme["text"], ' text-anchor="middle" font-weight="600"'))
        parts.append(_text(x + 79, 53, what, theme["faint"], ' text-anchor="middle"'))
        if i:
            parts.append(
                f'<path d="M{x - 28} 38h20m-6 -5l6 5l-6 5" fill="none" stroke="{theme["faint"]}" stroke-width="1.5"/>'
            )
    return _svg("Plan, compile, store, serve", 76, parts, theme)


def _padding_chart(data: dict[str, Any], theme: dict[str, str]) -> str:
    chosen = [data["padding"]["rows"][i] for i in data["padding"]["chart"]]
    rows = [
        (f"{server}: {phase}", [(own, f"{own}%", "before"), (planned, f"{planned}%", "after")])
        for server, phase, _, own, planned in chosen
    ]
    note = (
        "Grey: the server's own list. Blue: as many graphs, planned from traffic. Held-out half of a trace; simulated."
    )
    return _bars("Padding, as a share of the real work (lower is better)", note, rows, theme)


def _speed_chart(data: dict[str, Any], theme: dict[str, str]) -> str:
    rows = []
    for step in CHART_STEPS:
        for group in (one for one in data["steps"] if one["weights"] == "int8"):
            row = next(row for row in group["rows"] if row[0] == step)
            name = f"{step} · {data['hosts'][group['host']]['name']}"
            rows.append((name, [(1 / row[4], f"{faster(row[4])}×, over {row[2]}", "after")]))
    note = (
        "SmolLM2-135M in int8, 2 cores. 1 is the fastest of llama.cpp, openvino-genai and onnxruntime-genai in 8 bits."
    )
    return _bars("Speed relative to the fastest 8-bit baseline (higher is better)", note, rows, theme)


def _grid(data: dict[str, Any], theme: dict[str, str]) -> str:
    """Decode buckets as points, rows by KV cache blocks, both logarithmic: a server's own list and the planned one."""
    grid = data["grid"]
    points = [*grid["own"], *grid["tuned"]]
    limits = [math.log2(max(point[axis] for point in points)) for axis in (0, 1)]
    note = "A point is a graph. Padding is in-sample: on the trace that the list was planned from."
    parts = _heading("Decode buckets of vllm-gaudi, before and after", note, theme)
    for x0, name, colour, said in (
        (50, "own", "before", "the server's own"), (430, "tuned", "after", "planned from traffic"),
    ):  # fmt: skip
        padding = grid["padding"][name == "tuned"]
        parts.append(_text(x0, 62, f"{said}: {len(grid[name])} graphs, {padding} padding", theme["text"]))
        parts.append(f'<path d="M{x0} 72v200h300" fill="none" stroke="{theme["faint"]}"/>')
        for power in range(int(limits[0]) + 1):
            y = 276 - round(190 * power / limits[0], 1)
            parts.append(_text(x0 - 6, y, str(2**power), theme["faint"], ' text-anchor="end" font-size="10"'))
        for power in range(0, int(limits[1]) + 1, 2):
            x = x0 + round(290 * power / limits[1], 1)
            parts.append(_text(x, 286, str(2**power), theme["faint"], ' text-anchor="middle" font-size="10"'))
        parts.append(_text(x0 + 150, 302, "KV cache blocks of the batch", theme["faint"], ' text-anchor="middle"'))
        for rows, blocks in grid[name]:
            x, y = 290 * math.log2(blocks) / limits[1], 190 * math.log2(rows) / limits[0]
            parts.append(f'<circle cx="{x0 + x:.1f}" cy="{272 - y:.1f}" r="3" fill="{theme[colour]}"/>')
    middle = ' text-anchor="middle" transform="rotate(-90 14 172)"'
    parts.append(_text(14, 172, "rows", theme["faint"], middle))
    return _svg("Decode buckets before and after planning from traffic", 312, parts, theme)


def _cold_start(data: dict[str, Any], theme: dict[str, str]) -> str:
    """Two rows on one axis of seconds: a server that compiles its graphs at start, and one that opens a bundle."""
    start, left, width, y = data["cold_start"], 150, 560, 58
    graphs = len(start["graphs_s"])
    compiling = start["load_s"] + sum(start["graphs_s"]) + start["run_s"]
    opening = start["open_s"] + start["warm_up_s"]
    scale = width / compiling
    parts = _heading("Start of a server until it is ready", start["note"], theme)
    for name, text, segments in (
        (
            "compiles at start",
            f"ready after {compiling:.0f} s: traces and loads the model, compiles {graphs} graphs, runs each once",
            [(start["load_s"], "faint"), *((one, "before") for one in start["graphs_s"]), (start["run_s"], "after")],
        ),
        (
            "llmc serve",
            f"ready after {opening:.0f} s: opens the bundle, loads and runs its {graphs} graphs",
            [(start["open_s"], "faint"), (start["warm_up_s"], "after")],
        ),
    ):
        parts.append(_text(left - 10, y + 17, name, theme["text"], ' text-anchor="end"'))
        parts.append(_text(left, y + 42, text, theme["text"]))
        x = float(left)
        for seconds, colour in segments:
            size = max(seconds * scale - 1, 1)
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{size:.1f}" height="26" fill="{theme[colour]}"/>')
            x += seconds * scale
        y += 62
    parts.append(f'<path d="M{left} {y}h{width}" stroke="{theme["faint"]}"/>')
    step = next(each for each in (1, 2, 5, 10, 20, 50, 100) if compiling / each <= 8)
    for seconds in range(0, int(compiling) + 1, step):
        x = left + seconds * scale
        parts.append(_text(x, y + 16, f"{seconds} s", theme["faint"], ' text-anchor="middle" font-size="10"'))
    return _svg("Seconds until a server is ready: compilation at start, and a bundle", y + 26, parts, theme)


def written() -> dict[str, str]:
    """The text of every file with figures, by its path from the repository's root."""
    data = tomllib.loads((ROOT / "benchmarks/results.toml").read_text(encoding="utf-8"))
    blocks: dict[str, Callable[[str], str]] = {
        "headlines": lambda document: _headlines(data, document),
        "int8": lambda _: _steps(data, "int8"),
        "four-bit": lambda _: _steps(data, "4-bit"),
        "padding": lambda _: _padding(data),
        "compared": lambda _: _compared(),
        "notations": lambda _: _notations(),
    }
    texts = {}
    for document in DOCUMENTS:
        text = (ROOT / document).read_text(encoding="utf-8")
        texts[document] = _BLOCK.sub(lambda found: found[1] + blocks[found[2]](document) + found[3], text)  # noqa: B023
    for theme, colours in THEMES.items():
        texts[f"{IMAGES}/pipeline-{theme}.svg"] = _pipeline(colours)
        texts[f"{IMAGES}/padding-{theme}.svg"] = _padding_chart(data, colours)
        texts[f"{IMAGES}/speed-{theme}.svg"] = _speed_chart(data, colours)
        texts[f"{IMAGES}/grid-{theme}.svg"] = _grid(data, colours)
        texts[f"{IMAGES}/cold-start-{theme}.svg"] = _cold_start(data, colours)
    return texts


def main() -> int:
    """Write what differs, or name it."""
    texts = written()
    differ = [name for name, text in texts.items() if not (ROOT / name).is_file() or (ROOT / name).read_text() != text]
    if "--check" in sys.argv[1:]:
        for name in differ:
            print(f"{name} differs from benchmarks/results.toml: run python -m scripts.results", file=sys.stderr)
        return 1 if differ else 0
    for name in differ:
        (ROOT / name).write_text(texts[name], encoding="utf-8")
        print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
