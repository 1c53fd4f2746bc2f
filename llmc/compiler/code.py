"""The key component `code`: a digest of the llmc sources that produce a result.

    code = digest of all that follows, " ", {module without "llmc.", "=", first 12 hex digits of its digest}

A module's digest covers its syntax tree (`facts`) and the bytes of files that it looks for in its own folder. Editing
comments, docstrings or layout keeps all keys. Any other edit of a counted module changes them.

Functions, methods and classes ("makers") produce a result. Reading sources finds the counted modules, and imports
nothing:

- the module of each maker and of every base class of its class, with their top-level imports;
- imports inside a function, and inside what it reaches by name in those modules; of a class, inside any of its methods;
- all imports of every module found this way, except those for type checking. A module that runs stages of its own
  counts with its top-level imports only, because keys name the results of its stages by digest;
- modules that a module names in its strings, and modules that a package imports by name on demand (in the package
  itself, or where import_module takes f"llmc.….{name}" or f"{__name__}.{name}");
- for a target or an executor of another package: that whole package, and what it imports of llmc.

STOPS are left out.

The digest of a syntax tree covers every statement except those without effect: docstrings and other constants that
stand alone, `pass`, and the body of `if TYPE_CHECKING:`. Comments, docstrings, blank lines, quotes, parentheses and
line breaks leave it unchanged, and any other edit changes it. People can forget to raise a version number; a digest
cannot be forgotten.

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
import importlib.util
import inspect
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple, TypeAlias

from llmc.artifacts.atomic_write import write_atomic
from llmc.artifacts.ownership import is_own, own_cache
from llmc.errors import CompileError
from llmc.registry import packages

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


Maker: TypeAlias = "Callable[..., Any] | type | str"
"""A function, method or class, or the name of a module, which stands for everything in it."""

ROOT = Path(__file__).parent.parent
STOPS = {
    "llmc.artifacts": "moves bytes by digest; a change of key or format code changes keys or schema",
    "llmc.cpus": "sets the number of threads, which no key contains, on purpose",
    "llmc.errors": "messages for people",
    "llmc.settings": "keys contain the settings that a result depends on, by value",
    "llmc.compiler.architectures.shared.caches": "keys contain the cache shape by value",
    "llmc.compiler.frontend.consumed": "refuses unread tensors and keys, and produces nothing",
    "llmc.compiler.targets.costs": "estimates times, and produces nothing",
    "llmc.runtime.accelerators": "reports this host's devices to people, and produces nothing",
    "llmc.compiler.stages": "builds keys and runs what other modules produce",
}
"""Modules and packages that change no result, each with the reason."""


class Source(NamedTuple):
    """A module: the digest of its source and its files, its top-level imports, and its later imports."""

    digest: str
    at_top: frozenset[str]
    later: frozenset[str]


@lru_cache(256)
def code_digest(*makers: Maker) -> str:
    """Digest of the sources that these functions, methods and classes use: the `code` of their common result."""
    return _component(closure(*makers))


@cache
def package_digest() -> str:
    """Digest of the bytes of all llmc sources."""
    content = hashlib.sha256()
    for path in sorted(ROOT.rglob("*.py")):
        content.update(
            f"{path.relative_to(ROOT).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode()
        )
    return "sha256:" + content.hexdigest()


def forget() -> None:
    """Clear the caches, so that the next request reads the sources again."""
    for known in (code_digest, package_digest, source_of, _is_module):
        known.cache_clear()


def closure(*makers: Maker) -> list[str]:
    """List the counted modules of these makers, sorted."""
    found: set[str] = set()
    pending = [module for maker in makers for module in _first(maker)]
    own = {module for maker in makers for module in _own(maker)}
    found |= own
    for module in own:
        pending += source_of(module).at_top
    while pending:
        module = pending.pop()
        if module in found or stopped(module):
            continue
        found.add(module)
        source = source_of(module)
        pending += source.at_top | source.later
    save()
    return sorted(found)


def stopped(module: str) -> bool:
    """Whether STOPS leave a module out."""
    return any(f"{module}.".startswith(f"{name}.") for name in STOPS)


@cache
def source_of(module: str) -> Source:
    """Digest and imports of a module."""
    if module.partition(".")[0] != "llmc":
        return _package(module)
    path = _path(module)
    said = facts(path.read_bytes())
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    content = hashlib.sha256(said.digest.encode())
    for file in _files_beside(path, said.files):
        content.update(f"\0{file.relative_to(path.parent).as_posix()} ".encode() + file.read_bytes())
    later = {_imported(name, package) for name in said.later} | {name for name in said.modules if _is_module(name)}
    for name in [*said.packages, *([""] if said.is_lazy else [])]:
        later |= _modules_in(name or package)
    at_top = frozenset(_imported(name, package) for name in said.at_top)
    return Source(content.hexdigest(), at_top, frozenset() if said.runs_stages else frozenset(later))


def _package(name: str) -> Source:
    found = importlib.util.find_spec(name)
    origin = Path(str(found.origin)) if found is not None and found.origin else None
    if origin is None:
        raise CompileError(f"package {name}, which executables depend on, has no source files; install it unpacked")
    files = sorted(origin.parent.rglob("*.py")) if found is not None and found.submodule_search_locations else [origin]
    content, imported = hashlib.sha256(), set[str]()
    for file in files:
        said = facts(file.read_bytes())
        content.update(f"\0{file.relative_to(origin.parent).as_posix()} {said.digest}".encode())
        imported |= {_imported(name, "") for name in (*said.at_top, *said.later) if not name.startswith(".")}
    return Source(content.hexdigest(), frozenset(imported), frozenset())


def _component(modules: list[str]) -> str:
    digests = {module.removeprefix("llmc."): source_of(module).digest for module in modules}
    whole = hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in digests.items()).encode())
    return " ".join([f"sha256:{whole.hexdigest()}", *(f"{name}={digest[:12]}" for name, digest in digests.items())])


def _modules_in(package: str) -> set[str]:
    init = _path(package)
    return {f"{package}.{file.stem}" for file in init.parent.glob("*.py") if file != init}


def _imported(statement: str, package: str) -> str:
    """Module of an import in the notation of `Facts`, relative to `package`."""
    module, _, name = statement.partition(":")
    if module.startswith("."):
        module = importlib.util.resolve_name(module, package)
    return inner if name and _is_module(inner := f"{module}.{name}") else module


def _files_beside(path: Path, names: Iterable[str]) -> Iterator[Path]:
    for name in names:
        beside = path.parent / name
        if beside.is_dir() and name not in (".", ".."):
            yield from (file for file in sorted(beside.rglob("*")) if file.is_file() and file.suffix != ".pyc")
        elif beside.is_file():
            yield beside


@cache
def _is_module(name: str) -> bool:
    return _path(name).is_file()


def _path(module: str) -> Path:
    at = ROOT.joinpath(*module.split(".")[1:])
    package = at / "__init__.py"  # an older version's compiled modules may leave a folder without sources
    return package if package.is_file() else at.with_suffix(".py")


def _own(maker: Maker) -> set[str]:
    """Modules of a maker and of its class's base classes. Another package counts as a whole."""
    if isinstance(maker, str):
        return set()
    owner = _owner(maker)
    classes = [] if owner is None else inspect.getmro(owner)
    modules = {maker.__module__, *(c.__module__ for c in classes)}
    others = {module.partition(".")[0] for module in modules if not module.startswith("llmc.")}
    others -= sys.stdlib_module_names | {"__main__"}
    return {m for m in modules if m.startswith("llmc.")} | (others & packages() if others else set())


def _owner(maker: Maker) -> type | None:
    if isinstance(maker, type):
        return maker
    bound = getattr(maker, "__self__", None)
    return bound if bound is None or isinstance(bound, type) else type(bound)


def _first(maker: Maker) -> set[str]:
    """Imports inside a maker's code, and inside all code that it reaches by name in its own modules."""
    if isinstance(maker, str):
        return {maker if maker.startswith("llmc.") else maker.partition(".")[0]}
    owner, own, found = _owner(maker), _own(maker), set[str]()
    if isinstance(maker, type):
        classes = [c for c in inspect.getmro(maker) if c.__module__ in own]
        pending = [f for c in classes for member in vars(c).values() for f in _functions(member)]
    else:
        pending = list(_functions(maker))
    seen = set[CodeType]()
    while pending:
        function = pending.pop()
        if function.__code__ in seen or function.__module__ not in own:
            continue
        seen.add(function.__code__)
        for names in _names(function.__code__):
            found |= {_imported(f"{m}:{name}", "") for m in names if m.startswith("llmc.") for name in names}
            for name in names:
                pending += _functions(function.__globals__.get(name))
                pending += [f for c in (inspect.getmro(owner) if owner else ()) for f in _functions(vars(c).get(name))]
    return found


def _functions(value: Any) -> Iterator[FunctionType]:
    if isinstance(value, type):
        for member in vars(value).values():
            if not isinstance(member, type):
                yield from _functions(member)
        return
    if isinstance(value, property):
        yield from (f for f in (value.fget, value.fset) if isinstance(f, FunctionType))
        return
    value = getattr(value, "func", None) or getattr(value, "__func__", value)  # cached_property; methods
    value = inspect.unwrap(value) if callable(value) else value
    if isinstance(value, FunctionType):
        yield value


def _names(code: CodeType) -> Iterator[tuple[str, ...]]:
    yield code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
