"""The imports of llmc, its tests and its scripts as a graph, and how many of them lie between a test and a module.

grimp finds the imports, those inside functions included and those for type checking left out. These edges are added:

- to a module that a string names, as in registries and after `python -m`: "llmc.a.b", "llmc.a.b:Class";
- to all modules of a package, from an f-string that names one of them: f"llmc.a.{name}", f"{__name__}.{name}";
- from a module that takes a name from a package with `__getattr__`, to the module that has the name;
- from a module to each package above it, whose `__init__` runs first; the node `llmc.a.__init__` is what runs then;
- from a test file to each conftest.py above it;
- to a module that tests reach in no other way (a program run by its path), from the nearest package that they reach.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import grimp

PACKAGES = ("llmc", "tests", "scripts", "benchmarks")
_INIT = ".__init__"
_NAMED = re.compile(
    r"""["';](?: *(?:from|import) )?((?:llmc|tests|scripts)(?:\.\w+)++)(?!["'] in )(?: import ([\w, ]+))?"""
)
_CONSTANT = re.compile(r'^(\w+) = "(llmc[\w.]*)"$', re.MULTILINE)
_PROGRAM = re.compile(r'"-m", "llmc"')
_ONE_OF = re.compile(r'f"((?:llmc|tests)[\w.]*|\{__name__\}|\{__package__\})\.\{')


class ImportGraph:
    """The graph of the tree below `root`, whose packages are read and not imported."""

    def __init__(self, root: Path) -> None:
        self._root = root
        sys.path.insert(0, str(root))
        try:
            found = grimp.build_graph(
                *(name for name in PACKAGES if (root / name).is_dir()),
                cache_dir=None, exclude_type_checking_imports=True,
            )  # fmt: skip
        finally:
            sys.path.remove(str(root))
        self._files = {name: path for name in found.modules if (path := self._file(name))}
        self._importers: dict[str, set[str]] = defaultdict(set)
        for name, path in self._files.items():
            text = path.read_text()
            imported = found.find_modules_directly_imported_by(name)
            for other in imported:
                self._add(name, other)
                if other in self._files and "\ndef __getattr__(" in (lazy := self._files[other].read_text()):
                    self._add(name, *(home for word, home in self._homes(other, lazy) if _takes(other, word, text)))
            if path.name == "__init__.py":
                self._add(name + _INIT, *imported)
                self._add(name, name + _INIT)
            if "\ndef __getattr__(" not in text:
                self._add(name, *self._named(name, text))
            self._add(name, *self._run_before(name))
        self._add_unreached()

    def module_of(self, file: str) -> str | None:
        """The node of a file (relative to the root); None where it is no module."""
        name = file.removesuffix(".py").replace("/", ".")
        return name if file.endswith(".py") and name.removesuffix(_INIT) in self._files else None

    def naming(self, words: Iterable[str]) -> set[str]:
        """The modules of tests and scripts whose text has one of these words, which may be paths."""
        pattern = re.compile("|".join(rf"(?<![\w.-]){re.escape(word)}(?![\w-])" for word in words))
        ours = ((name, path) for name, path in self._files.items() if not name.startswith("llmc"))
        return {name for name, path in ours if pattern.search(path.read_text())}

    def package_of(self, file: str) -> str | None:
        """The node of the innermost package that holds a file; None where no package does."""
        for folder in Path(file).parents:
            if (name := ".".join(folder.parts)) in self._files:
                return name + _INIT
        return None

    def test_files(self) -> dict[str, str]:
        """Each test file (relative to the root), and its module."""
        files = {name: path.relative_to(self._root).as_posix() for name, path in self._files.items()}
        return {file: name for name, file in files.items() if re.fullmatch(r"tests/(.*/)?test_\w+\.py", file)}

    def hops(self, modules: Iterable[str]) -> dict[str, int]:
        """The test files that import any of `modules`, and by how many imports the nearest; 0 for one of `modules`."""
        hops = dict.fromkeys(modules, 0)
        ring = list(hops)
        while ring:
            after = dict.fromkeys(other for name in ring for other in self._importers[name] if other not in hops)
            hops |= dict.fromkeys(after, hops[ring[0]] + 1)
            ring = list(after)
        return {file: hops[name] for file, name in self.test_files().items() if name in hops}

    def _add(self, name: str, *imported: str) -> None:
        for other in imported:
            if other != name:
                self._importers[other].add(name)

    def _file(self, name: str) -> Path | None:
        base = self._root.joinpath(*name.split("."))
        return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)

    def _add_unreached(self) -> None:
        imports: dict[str, set[str]] = defaultdict(set)
        for other, importers in self._importers.items():
            for name in importers:
                imports[name].add(other)
        reached = set(self.test_files().values())
        ring = list(reached)
        while ring:
            ring = list({other for name in ring for other in imports[name]} - reached)
            reached.update(ring)
        modules = {name for name, path in self._files.items() if path.name != "__init__.py"}
        for name in sorted(modules - reached):
            parts = name.split(".")
            above = (".".join(parts[:count]) + _INIT for count in range(len(parts) - 1, 0, -1))
            if package := next((one for one in above if one in reached), None):
                self._add(package, name)

    def _homes(self, package: str, text: str) -> Iterator[tuple[str, str]]:
        """The names that a package imports on first use, and their modules, from dictionaries in its source."""
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                        yield from (
                            (str(key.value), home)
                            for home in (str(value.value), f"{package}.{value.value}")
                            if home in self._files
                        )

    def _named(self, name: str, text: str) -> Iterator[str]:
        """The modules that strings of a module name."""
        for word, value in _CONSTANT.findall(text):
            text = text.replace(f"{{{word}}}", value)
        for found, taken in _NAMED.findall(text):
            parts = found.split(".")
            known = [".".join(parts[:count]) for count in range(len(parts), 1, -1)]
            yield from [one for one in known if one in self._files][:1]
            yield from (one for word in taken.split(",") if (one := f"{found}.{word.strip()}") in self._files)
        if _PROGRAM.search(text):
            yield "llmc.__main__"
        for found in _ONE_OF.findall(text):
            package = name if found.startswith("{") else found
            yield from (one for one in self._files if one.rpartition(".")[0] == package)

    def _run_before(self, name: str) -> Iterator[str]:
        """The packages above a module, and a test's conftest.py files."""
        parts = name.split(".")
        for count in range(1, len(parts)):
            above = ".".join(parts[:count])
            yield above + _INIT
            if parts[-1].startswith("test_") and f"{above}.conftest" in self._files:
                yield f"{above}.conftest"


def _takes(package: str, word: str, text: str) -> bool:
    """Whether a module takes a name from a package: `from package import name`, or `package.name`."""
    last = package.rpartition(".")[2]
    return bool(re.search(rf"from {package} import (?:\([^)]*|[^\n]*)\b{word}\b|\b{last}\.{word}\b", text))
