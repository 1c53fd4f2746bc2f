"""Facts about a Python source, whatever its layout: a digest of its syntax tree, its imports and the names in it.

The digest covers every statement except those without effect: docstrings and other constants that stand alone, `pass`,
and the body of `if TYPE_CHECKING:`. Comments, docstrings, blank lines, quotes, parentheses and line breaks leave it
unchanged, and any other edit changes it. People can forget to raise a version number; a digest cannot be forgotten.

It is the same under every version of Python that llmc supports. Fields that a later version added are empty in sources
for an earlier one, and empty fields are left out. The empty pieces that Python 3.12 adds to f-strings are left out as
well.

Parsing takes most of the time. A record in llmc's cache folder, or in the user's where others may write to that, stores
the facts by the sha256 of the file:

    record = {"reader": sha256 of this module's source, "sources": {sha256 of a source: the fields of Facts}}

An entry depends only on the bytes that name it, and cannot be out of date.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import threading
from functools import cache
from pathlib import Path
from typing import NamedTuple

from llmc.artifacts.atomic_write import write_atomic
from llmc.artifacts.ownership import is_own, own_cache

RECORD = "sources.json"
MAX_SOURCES = 4096
"""Sources in a record; beyond them it starts afresh."""
MAX_BYTES = 16 << 20
_MODULE = re.compile(r"llmc(\.\w+)+")
_FILE = re.compile(r"[\w.-]+")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Facts(NamedTuple):
    """Facts about one source. An import is "module:name", or "module:" for a whole module; a relative one has dots."""

    digest: str
    at_top: list[str]
    """Imports of llmc and relative ones that run when the module is imported."""
    later: list[str]
    """Imports in functions."""
    modules: list[str]
    """Strings that may name modules of llmc."""
    packages: list[str]
    """Packages from which a module is imported by a computed name; "" is the source's own package."""
    files: list[str]
    """Strings that may name files in the source's folder; none unless it reads `__file__`."""
    is_lazy: bool
    """Whether the module has a `__getattr__`."""
    runs_stages: bool
    """Whether it calls `run` of stages."""


def facts(data: bytes) -> Facts:
    """Facts about a source. A file that this Python cannot parse counts by its bytes."""
    name = hashlib.sha256(data).hexdigest()
    with _reading:
        known = _known()
        if name not in known:
            try:
                known[name] = _Reader(ast.parse(data)).facts()
            except (SyntaxError, ValueError, RecursionError):
                return Facts(name, [], [], [], [], [], False, False)
            _unsaved.add(name)
        return known[name]


def save() -> None:
    """Write the record if anything was parsed. A folder that cannot be written only costs the time to parse again."""
    with _reading:
        if not _unsaved:
            return
        known, file = _known(), own_cache() / RECORD
        kept = {name: known[name] for name in (known if len(known) <= MAX_SOURCES else _unsaved)}
        _unsaved.clear()
    data = json.dumps({"reader": _reader(), "sources": kept}, separators=(",", ":")).encode()
    try:
        file.parent.mkdir(0o700, parents=True, exist_ok=True)
        write_atomic(file, data, file.parent, durable=False, mode=0o600)
    except OSError:
        return


_unsaved: set[str] = set()
_reading = threading.Lock()
"""Held while a source is parsed: `ast.parse` counts its depth for all threads together, and in two at once it can fail
with "AST constructor recursion depth mismatch" (CPython issue 106905)."""


@cache
def _known() -> dict[str, Facts]:
    """The saved record; empty where there is none, or others could have written it."""
    file = own_cache() / RECORD
    try:
        with file.open("rb") as stream:
            if not (is_own(os.fstat(stream.fileno())) and is_own(file.parent.stat())):
                return {}
            record = json.loads(stream.read(MAX_BYTES))
        return {name: Facts(*said) for name, said in record["sources"].items()} if record["reader"] == _reader() else {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


@cache
def _reader() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


class _Reader:
    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._words: list[str] = []
        self._at_top, self._later, self._packages, self._strings = set[str](), set[str](), set[str](), set[str]()
        self._reads_file = self._runs_stages = False

    def facts(self) -> Facts:
        self._node(self._tree, inside=False)
        strings = sorted(self._strings)
        return Facts(
            hashlib.sha256("\n".join(self._words).encode()).hexdigest(),
            sorted(self._at_top),
            sorted(self._later - self._at_top),
            [text for text in strings if _MODULE.fullmatch(text)],
            sorted(self._packages),
            [text for text in strings if self._reads_file and _FILE.fullmatch(text)],
            any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in self._tree.body),
            self._runs_stages,
        )

    def _node(self, node: ast.AST, inside: bool) -> None:
        """Write a node as its class, its fields that are not empty, and ")"; `inside` a function or not."""
        if type(node) in _SEEN:
            self._see(node, inside)
        self._words.append(type(node).__name__)
        skipped = "body" if isinstance(node, ast.If) and _is_for_types(node.test) else "ctx"
        inside = inside or isinstance(node, _FUNCTIONS)
        for name in node._fields:
            value = getattr(node, name, None)
            if value is None or name in (skipped, "kind"):
                continue
            if isinstance(value, ast.AST):
                self._words.append(name)
                self._node(value, inside)
            elif isinstance(value, list):
                self._list(name, [item for item in value if not _without_effect(node, item)], inside)
            else:  # `ascii`, because Python's tables determine which characters `repr` escapes
                self._words.append(f"{name}={value!a}")
        self._words.append(")")

    def _list(self, name: str, items: list[ast.AST | str | None], inside: bool) -> None:
        if not items:
            return
        self._words.append(f"{name}[")
        for item in items:
            if isinstance(item, ast.AST):
                self._node(item, inside)
            else:
                self._words.append(ascii(item))
        self._words.append("]")

    def _see(self, node: ast.AST, inside: bool) -> None:
        imports = self._later if inside else self._at_top
        match node:
            case ast.Import(names):
                imports |= {f"{alias.name}:" for alias in names if alias.name.partition(".")[0] == "llmc"}
            case ast.ImportFrom(module, names, level):
                if level or (module or "").partition(".")[0] == "llmc":
                    imports |= {f"{'.' * (level or 0)}{module or ''}:{alias.name}" for alias in names}
            case ast.Constant(str(text)):
                self._strings.add(text)
            case ast.Name("__file__"):
                self._reads_file = True
            case ast.Call(ast.Attribute(owner, "run")):
                name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
                self._runs_stages |= name.endswith("stages")
            case ast.Call(ast.Name("import_module") | ast.Attribute(attr="import_module"), [ast.JoinedStr(parts), *_]):
                self._import_computed(parts)

    def _import_computed(self, parts: list[ast.expr]) -> None:
        match parts:
            case [ast.FormattedValue(ast.Name("__name__")), ast.Constant("."), *_]:
                self._packages.add("")
            case [ast.Constant(str(text)), ast.FormattedValue(), *_] if text.startswith("llmc.") and text.endswith("."):
                self._packages.add(text.rstrip("."))


_SEEN = frozenset({ast.Import, ast.ImportFrom, ast.Constant, ast.Name, ast.Call})


def _without_effect(node: ast.AST, item: ast.AST | str | None) -> bool:
    if isinstance(node, ast.JoinedStr):
        return isinstance(item, ast.Constant) and item.value == ""
    return isinstance(item, ast.Pass) or (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant))


def _is_for_types(test: ast.expr) -> bool:
    return isinstance(test, ast.Name | ast.Attribute) and ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
