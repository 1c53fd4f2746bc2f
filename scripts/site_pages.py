"""What mkdocs asks when it builds the site: files outside docs/ that pages link to become pages, too.

Documents link as GitHub follows links, by relative paths. A Markdown file outside docs/ is a page below repository/ as
it is, another file a page that shows it; links are turned to where their pages are. A link to what is not there stays
as it is, which `mkdocs build --strict` refuses. A notebook is a page of its cells and what they
showed. The page of commands ends with every command's options, from the commands themselves.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = "repository/"
"""Where in the site files from outside docs/ are."""

COMMANDS = "commands.md"
NOTEBOOK = ".ipynb"

_LINK = re.compile(r"(?<=\]\()(?!\w+:|[#/])([^)\s#]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the navigation and pages name outside docs/, and what that names in turn."""
    from mkdocs.structure.files import File

    todo = [name.removeprefix(OUTSIDE) for name in _named(config.nav) if name.startswith(OUTSIDE)]
    for page in files.documentation_pages():
        todo += _linked(f"docs/{page.src_uri}", page.content_string)
    for file in [one for one in files if one.src_uri.endswith(NOTEBOOK)]:
        text = _notebook(ROOT / "docs" / file.src_uri)
        files.append(File.generated(config, _uri(f"docs/{file.src_uri}"), content=text))
        todo += _linked(f"docs/{file.src_uri}", text)
    while todo:
        path = todo.pop()
        uri = _uri(path)
        if not uri.startswith(OUTSIDE) or uri in files.src_uris or not (ROOT / path).is_file():
            continue
        text = _content(path)
        files.append(File.generated(config, uri, content=text))
        if path.endswith(".md"):
            todo += _linked(path, text)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the links of a page to where in the site their pages are."""
    here = page.file.src_uri
    path = here.removeprefix(OUTSIDE) if here.startswith(OUTSIDE) else f"docs/{here}"

    def turned(link: re.Match[str]) -> str:
        uri = _uri(posixpath.normpath(posixpath.join(posixpath.dirname(path), link[1])))
        return posixpath.relpath(uri, posixpath.dirname(here)) if uri in files.src_uris else link[1]

    markdown = _LINK.sub(turned, markdown)
    return f"{markdown}\n{reference()}" if here == COMMANDS else markdown


def reference() -> str:
    """Every command with its text, example, arguments and options, in Markdown."""
    return "\n\n".join(["## All options", *(_described(path, ctx) for path, ctx in commands())]) + "\n"


def commands() -> Iterator[tuple[str, Any]]:
    """Every command as it is typed, such as "llmc cache ls", and its context."""
    import typer
    from typer.main import get_group

    from llmc.cli.root import app

    root = get_group(app())
    return _below(root, typer.Context(root, info_name="llmc"))


def _below(group: Any, ctx: Any) -> Iterator[tuple[str, Any]]:
    import typer

    for name in list(group.list_commands(ctx)):
        _, command, _ = group.resolve_command(ctx, [name])
        own = typer.Context(command, parent=ctx, info_name=name)
        if hasattr(command, "list_commands"):
            yield from _below(command, own)
        else:  # a hidden command is the default of its group
            yield (ctx if command.hidden else own).command_path, own


def _described(path: str, ctx: Any) -> str:
    """The section of a command, its options by the panels of its help."""
    from llmc.cli.options import panel_of

    text, _, example = cleandoc(ctx.command.help).partition("\b\n")
    parts = [f"### {path}", text.strip()]
    if example:
        parts.append(f"```\n{dedent(example.partition(chr(10))[2]).rstrip()}\n```")
    panels: dict[str, list[str]] = {}
    for param in ctx.command.get_params(ctx):
        if record := param.get_help_record(ctx):
            kind = "Arguments" if param.param_type_name == "argument" else "Options"
            title = (
                (getattr(param, "rich_help_panel", None) or kind)
                .replace(panel_of(()), "Options of ")
                .replace(",", ", ")
            )
            panels.setdefault(title, []).append("- `{}`: {}".format(*record))
    return "\n\n".join([*parts, *(f"**{title}**\n\n" + "\n".join(lines) for title, lines in panels.items())])


def _named(nav: Any) -> Iterator[str]:
    """The files that a navigation names."""
    if isinstance(nav, str):
        yield nav
    else:
        for one in nav.values() if isinstance(nav, dict) else nav:
            yield from _named(one)


def _linked(path: str, text: str) -> Iterator[str]:
    """What the document at `path` links to, from the repository's root."""
    for link in _LINK.findall(text):
        yield posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def _uri(path: str) -> str:
    """Where in the site's sources the file of the repository at `path` is."""
    if path.startswith("docs/"):
        return re.sub(rf"{re.escape(NOTEBOOK)}$", ".md", path.removeprefix("docs/"))
    return OUTSIDE + (path if path.endswith(".md") else f"{path}.md")


def _notebook(path: Path) -> str:
    from nbconvert import MarkdownExporter

    text: str = MarkdownExporter().from_filename(str(path))[0]
    return text


def _content(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    language = {".py": "python", ".yml": "yaml", ".toml": "toml", ".json": "json"}.get(Path(path).suffix, "text")
    return f"---\nsearch: {{exclude: true}}\n---\n# {Path(path).name}\n\n`{path}`\n\n````{language}\n{text}\n````\n"
