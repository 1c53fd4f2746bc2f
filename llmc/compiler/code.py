"""The key component `code`: a digest of the llmc sources that produce a result.

    code = digest of all that follows, " ", {module without "llmc.", "=", first 12 hex digits of its digest}

A module's digest covers its syntax tree (source.py) and the bytes of files that it looks for in its own folder. Editing
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
    """Module of an import in source.py's notation, relative to `package`."""
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
