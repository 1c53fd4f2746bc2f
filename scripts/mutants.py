"""Single-token mutants of Python source: comparisons, arithmetic, constants, and/or, `not`, branches and return values.

Offsets are those of bytes, as ast has them, so that the rest of the file keeps its formatting. These places have no
mutants, since a change there is one of words, types or set-up: docstrings and other strings, annotations, decorators,
`raise` statements, logging calls, `if TYPE_CHECKING`, `if __name__ == …`, `__all__` and `zip(…, strict=…)`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

COMPARISONS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}  # fmt: skip
ARITHMETIC: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"), ast.Pow: ("**", "*"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.BitXor: ("^", "|"),
}  # fmt: skip
LOGGERS = frozenset({"log", "logger", "logging", "warnings", "_log", "LOG"})
_NO_CODE = frozenset({"annotation", "returns", "decorator_list"})


class Mutant(NamedTuple):
    """Replaces the bytes from `start` to `end` by `text`. `line` is the number of the line where they begin."""

    line: int
    start: int
    end: int
    text: str
    kind: str

    def applied(self, source: bytes) -> bytes:
        """The mutated source."""
        return source[: self.start] + self.text.encode() + source[self.end :]

    def is_valid(self, source: bytes) -> bool:
        """Whether the mutated source compiles, and to something else."""
        mutated = self.applied(source)
        try:
            compile(mutated, "mutant", "exec", dont_inherit=True)
        except SyntaxError:
            return False
        return ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source))


def mutants_of(source: bytes) -> list[Mutant]:
    """All mutants of a module, in the order of its text."""
    return sorted(_Finder(source).found(), key=lambda mutant: (mutant.start, mutant.end, mutant.text))


class _Finder:
    def __init__(self, source: bytes) -> None:
        self._source = source
        self._lines = [0]
        for line in source.split(b"\n"):
            self._lines.append(self._lines[-1] + len(line) + 1)

    def found(self) -> Iterator[Mutant]:
        for node in _code(ast.parse(self._source)):
            match node:
                case ast.Compare():
                    operands = [node.left, *node.comparators]
                    for operator, left, right in zip(node.ops, operands, node.comparators, strict=False):
                        yield from self._between("comparison", left, right, COMPARISONS.get(type(operator)))
                case ast.BoolOp():
                    swap = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                    for left, right in zip(node.values, node.values[1:], strict=False):
                        yield from self._between("and/or", left, right, swap)
                case ast.BinOp():
                    yield from self._between("arithmetic", node.left, node.right, ARITHMETIC.get(type(node.op)))
                case ast.AugAssign():
                    yield from self._between("arithmetic", node.target, node.value, ARITHMETIC.get(type(node.op)))
                case ast.UnaryOp(op=ast.Not()):
                    rest = self._source[self._start(node) + len(b"not") : self._end(node)].lstrip()
                    yield self._mutant("not", self._start(node), self._end(node) - len(rest), "")
                case ast.If() | ast.While() if not isinstance(node.test, ast.Constant):
                    yield self._mutant("branch", self._start(node.test), self._end(node.test), "False")
                case ast.Return(value=ast.expr() as value) if not _is_none(value):
                    yield self._mutant("return", self._start(value), self._end(value), "None")
                case ast.Constant(value=bool() as value):
                    yield self._mutant("constant", self._start(node), self._end(node), str(not value))
                case ast.Constant(value=int() | float() as value):
                    yield self._mutant("constant", self._start(node), self._end(node), repr(value + 1))

    def _between(self, kind: str, left: ast.AST, right: ast.AST, swap: tuple[str, str] | None) -> Iterator[Mutant]:
        """An operator between two operands; none where a comment is there too, which may say the same."""
        begin, end = self._end(left), self._start(right)
        if swap is None or b"#" in self._source[begin:end]:
            return
        at = self._source.find(swap[0].encode(), begin, end)
        if at >= 0:
            yield self._mutant(kind, at, at + len(swap[0]), swap[1])

    def _mutant(self, kind: str, start: int, end: int, text: str) -> Mutant:
        return Mutant(self._source.count(b"\n", 0, start) + 1, start, end, text, kind)

    def _start(self, node: ast.AST) -> int:
        return self._lines[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]

    def _end(self, node: ast.AST) -> int:
        return self._lines[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below one that may be mutated, itself included."""
    yield node
    for field, value in ast.iter_fields(node):
        if field in _NO_CODE:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _left_out(child):
                yield from _code(child)


def _left_out(node: ast.AST) -> bool:
    match node:
        case ast.JoinedStr() | ast.Raise():
            return True
        case ast.If(test=ast.Name("TYPE_CHECKING") | ast.Compare(left=ast.Name("__name__"))):
            return True
        case ast.Assign(targets=[ast.Name("__all__")]) | ast.AnnAssign(annotation=ast.Name("TypeAlias")):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(name))) if name in LOGGERS:
            return True
        case ast.keyword(arg="strict"):
            return True
    return False


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
