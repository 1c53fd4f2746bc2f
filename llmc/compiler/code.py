"""The component `code` of a key: a digest of the llmc sources that make the result.

    code = digest of all that follows, " ", {module without "llmc.", "=", first 12 hex digits of its digest}

The digest of a module is that of its syntax tree (source.py), and of the bytes of files that it looks for beside it.
So an edit of comments, docstrings or layout keeps all keys, and any other edit of a module that counts changes them.

A result is made by functions, methods and classes. What counts is found by reading sources, and imports nothing:

- the module of each of them, and of every class that its class inherits from, with what those import at their top;
- what the function, and what it reaches by name in those modules, imports as it runs; of a class, any of its methods;
- of every module so found all that it imports, anywhere but for type checking. Where it runs stages of its own, only
  what it imports at its top: what its stages make is in keys by digest;
- modules that a module names in a string of their own, and those of a package that are imported by name only when they
  are asked for (by the package itself, or where import_module takes f"llmc.….{name}" or f"{__name__}.{name}");
- of a target or an executor that another package brings, that whole package, and what it imports of llmc.

STOPS are left out.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple, TypeAlias

from llmc.compiler.source import facts, save
from llmc.errors import CompileError
from llmc.registry import packages

Maker: TypeAlias = "Callable[..., Any] | type | str"
"""A function, a method, a class, or the name of a module, which stands for all that is in it."""

ROOT = Path(__file__).parent.parent
STOPS = {
    "llmc.artifacts": "moves bytes by digest; a change of how keys or formats are written changes keys or schema",
    "llmc.cpus": "how many threads run, which changes no key on purpose",
    "llmc.errors": "words for people",
    "llmc.settings": "settings that a result depends on are components by value",
    "llmc.compiler.architectures.shared.caches": "the shape of a cache is a component by value",
    "llmc.compiler.frontend.consumed": "refuses what nothing would read, and makes nothing",
    "llmc.compiler.targets.costs": "times are estimated by it, and nothing is made of them",
    "llmc.runtime.accelerators": "finds the cards of this host for people, and makes nothing",
    "llmc.compiler.stages": "makes keys and runs what other modules make",
}
"""Modules and packages that change no result, each with the reason."""


class Source(NamedTuple):
    """A module: digest of its source and the files beside it; modules that it imports at its top, and later."""

    digest: str
    at_top: frozenset[str]
    later: frozenset[str]


@lru_cache(256)
def code_digest(*makers: Maker) -> str:
    """The `code` of a result that these functions, methods and classes make together."""
    return _component(closure(*makers))


@cache
def package_digest() -> str:
    """Digest of all of llmc's own sources, by their bytes."""
    content = hashlib.sha256()
    for path in sorted(ROOT.rglob("*.py")):
        content.update(
            f"{path.relative_to(ROOT).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode()
        )
    return "sha256:" + content.hexdigest()


def forget() -> None:
    """Read sources again when they are next asked for."""
    for known in (code_digest, package_digest, source_of, _is_module):
        known.cache_clear()


def closure(*makers: Maker) -> list[str]:
    """The modules whose sources make the result of these makers, sorted."""
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
    """What a module consists of, and imports."""
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
    """All sources of another package, or module, that brings a target or an executor, and what they import of llmc."""
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
    """The module of an import as source.py writes it, in a module of a package."""
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
    package = at / "__init__.py"  # a folder alone may be what an older version's compiled modules left
    return package if package.is_file() else at.with_suffix(".py")


def _own(maker: Maker) -> set[str]:
    """Modules of a maker and of the classes that its class inherits from; of another package, the whole package."""
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
    """The imports of a maker's code while it runs, and of all code that it reaches by name in its own modules."""
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
    """The functions of a function, method, property or class."""
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
    """Names that code uses, and those of the code in it."""
    yield code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
