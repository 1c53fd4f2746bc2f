"""Functions of other projects' source files, run on their own: their packages are neither installed nor imported."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any


@cache
def source(root: Path, path: str) -> ast.Module:
    """The parsed file at `path` of an unpacked package."""
    return ast.parse((root / path).read_text(encoding="utf-8"))


def extract(tree: ast.Module, name: str, known: Mapping[str, Any]) -> Callable[..., Any]:
    """The function `name`, of a class or of the module, with `known` as its globals.

    Imports within the function, its decorators and its annotations are left out: what it imports has to be in `known`.
    Raises KeyError where the file no longer has such a function, which is a difference like any other.
    """
    space = dict(known)
    exec(_code(tree, name), space)
    built: Callable[..., Any] = space[name]
    return built


def extract_class(tree: ast.Module, name: str, known: Mapping[str, Any]) -> Any:
    """The class `name` of the module, decorators of its methods included, with `known` as its globals.

    Its annotations are not evaluated. Raises KeyError where the file no longer has such a class.
    """
    found = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    if found is None:
        raise KeyError(name)
    space = dict(known)
    exec(compile(ast.Module([found], []), name, "exec", annotations.compiler_flag), space)
    return space[name]


def parameters(tree: ast.Module, name: str) -> list[str]:
    """The names of the parameters of the function `name`."""
    return [argument.arg for argument in _function(tree, name).args.args]


@cache
def _function(tree: ast.Module, name: str) -> ast.FunctionDef:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise KeyError(name)


@cache
def _code(tree: ast.Module, name: str) -> CodeType:
    module = ast.Module([_Bare().visit(_function(tree, name))], [])
    return compile(ast.fix_missing_locations(module), name, "exec")


class _Bare(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.decorator_list, node.returns = [], None
        for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
            argument.annotation = None
        return node

    def visit_Import(self, node: ast.Import) -> ast.AST:
        return ast.Pass()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        return ast.Pass()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        return ast.Assign([node.target], node.value) if node.value is not None else ast.Pass()
