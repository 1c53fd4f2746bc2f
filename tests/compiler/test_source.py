"""Layout, comments and docstrings leave the digest of a source as it is; every other edit changes it."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llmc.compiler import code as source
from llmc.compiler.code import Facts, facts

BASE = '''"""A module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.a import ONE

if TYPE_CHECKING:
    from llmc.b import B

SIZE = 8
"""Bytes."""


def f(x: B, *, y=(1, 2)) -> str:
    """Doubles.

    Twice.
    """
    # Why
    from llmc.c import d

    if x:
        pass
    return f"{x + ONE!r:>{y[0]}} is {d}" + "long" "er"
'''
KEPT = {
    "comment": ("    # Why\n", "    # Because\n"),
    "no comment": ("    # Why\n", ""),
    "docstring": ("    Twice.\n", "    Thrice.\n"),
    "no docstring": ('"""A module."""\n', ""),
    "docstring of a constant": ('"""Bytes."""\n', ""),
    "blank lines": ("SIZE = 8\n", "\n\n\nSIZE = 8\n\n"),
    "quotes": ('"long" "er"', "'longer'"),
    "numbers": ("SIZE = 8", "SIZE = 0x8"),
    "parentheses and line breaks": ("return f", "return (\n        f"), "trailing comma": ("(1, 2)", "(1, 2,)"),
    "types": ("    from llmc.b import B\n", "    from llmc.e import B, C\n"),
    "pass": ("        pass\n", "        ...\n"),
    "carriage returns": ("\n", "\r\n"),
}  # fmt: skip
CHANGED = {
    "constant": ("SIZE = 8", "SIZE = 9"), "kind of number": ("SIZE = 8", "SIZE = 8.0"),
    "name": ("SIZE = 8", "SIZES = 8"), "import": ("import ONE", "import TWO as ONE"),
    "import in a function": ("from llmc.c import d", "from llmc.e import d"),
    "relative import": ("from llmc.c import d", "from .c import d"), "operator": ("x + ONE", "x - ONE"),
    "default": ("y=(1, 2)", "y=(1, 3)"), "keyword": ("x: B, *, y", "x: B, y"), "annotation": ("x: B", "x: C"),
    "text": ('"er"', '"est"'), "piece of an f-string": (" is ", " was "), "conversion": ("!r:", "!s:"),
    "format": (">{", "<{"), "indentation": ("    return", "        return"), "condition": ("if x:", "if not x:"),
    "decorator": ("def f", "@g\ndef f"), "statement": ("    if x:\n        pass\n", ""),
    "not only for types": ("if TYPE_CHECKING:", "if TYPE_CHECKED:"),
}  # fmt: skip
EVERY_SYNTAX = r'''
@d
async def f(a, /, b: int = 1, *c, d=2, **e) -> None:
    """Doc."""
    x = f"{a!r:>{b}} {c=} {{}} é" "tail" u"k" if 0 else f"" f"{d:}" f"{a=!s:>3}" f"{a:{b}{c}}"
    async with g() as h: await h
    match x:
        case None | True | {"a": 1, **rest}: pass
        case P(1, q=[*_, y]): ...
    try: pass
    except* (A, B) as z: raise z from None
    finally: del x[1:2, ...], y.z
    return lambda *, k: {**a, 1: 2}, [i async for i in a
                                         if (n := i)], 1e300, -0.0, 2j, 10**30, rb"\x", "ۢ\U00010d4e\u200b"
class C(B, metaclass=M):
    a: int
    (b): int = 3
    global q
'''


def digest(text: str) -> str:
    return facts(text.encode()).digest


@pytest.mark.parametrize("edit", KEPT)
def test_an_edit_without_effect_keeps_the_digest(edit: str) -> None:
    old, new = KEPT[edit]
    edited = BASE.replace(old, new).replace('"er"\n', '"er"\n    )\n' if "(\n        f" in new else '"er"\n')
    assert edited != BASE
    assert digest(edited) == digest(BASE)


@pytest.mark.parametrize("edit", CHANGED)
def test_any_other_edit_changes_it(edit: str) -> None:
    edited = BASE.replace(*CHANGED[edit])
    assert edited != BASE
    assert digest(edited) != digest(BASE)


def test_every_version_of_python_gives_the_same_digest() -> None:
    """The tests run on each; what is here was the same on 3.11, 3.12 and 3.13."""
    assert digest(EVERY_SYNTAX) == "29d133a85ef8b321eb79a02b57b0911dea2ecfd3f2fd963c1585ed07d771a423"


def test_what_a_source_names() -> None:
    text = (
        "import llmc.a as x, numpy, llmc.b.c\nfrom .. import d\nfrom llmc import e\ntry:\n    from llmc.f import (\n"
        '        g,  # why\n    )\nexcept ImportError:\n    pass\nKNOWN = {"h": "llmc.h", "i": "llmc.i:I"}\n'
        'HERE = Path(__file__).parent / "table.json"\n'
        "def j():\n    import llmc.k\n    from .l import m\n    self.stages.run('x')\n"
        '    import_module(f"llmc.n.{x}"); importlib.import_module(f"{__name__}.{x}"); import_module(f"{x}.y")\n'
        "def __getattr__(name): ...\n"
    )
    found = facts(text.encode())
    assert found == Facts(
        found.digest,
        at_top=["..:d", "llmc.a:", "llmc.b.c:", "llmc.f:g", "llmc:e"],
        later=[".l:m", "llmc.k:"],
        modules=["llmc.h"],
        packages=["", "llmc.n"],
        files=[".", ".y", "h", "i", "llmc.h", "llmc.n.", "table.json", "x"],
        is_lazy=True,
        runs_stages=True,
    )


def test_a_file_that_is_no_python_counts_by_its_bytes() -> None:
    assert len({digest("print 1"), digest("print 2"), digest("\0")}) == 3


def test_sources_are_parsed_in_several_threads_at_once(record: Path) -> None:
    """Python's own parser fails where another thread parses too and a garbage collection hands it the processor."""
    lines = "\n".join(f"a{n} = [{n}, {{'b': ({n} + 1) * c(2, d=[1, 2, 3])}}]" for n in range(300))
    sources = [f"{lines}\nlast = {n}\n".encode() for n in range(6)]
    thresholds = gc.get_threshold()

    def hand_over(phase: str, info: dict[str, int]) -> None:
        time.sleep(1e-5)

    gc.callbacks.append(hand_over)
    gc.set_threshold(50)
    try:
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(facts, sources))
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(hand_over)
    assert found == [facts(text) for text in sources]
    assert len({each.digest for each in found}) == len(sources)


# The record


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))
    source._known.cache_clear()
    yield tmp_path / "cache" / "sources.json"
    source._known.cache_clear()


def parsed_again(monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether BASE is parsed by a new process."""
    source._known.cache_clear()
    parsed: list[object] = []
    with monkeypatch.context() as patch:
        parse = source.ast.parse
        patch.setattr(source.ast, "parse", lambda data: parsed.append(data) or parse(data))
        facts(BASE.encode())
    return bool(parsed)


def test_a_source_is_parsed_once(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = facts(BASE.encode())
    source.save()
    assert not parsed_again(monkeypatch)
    assert facts(BASE.encode()) == before


@pytest.mark.parametrize("why", ["of another reader", "damaged", "incomplete", "that others may write"])
def test_a_record_is_not_believed(why: str, record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts(BASE.encode())
    source.save()
    if why == "that others may write":
        record.chmod(0o666)
    elif why == "damaged":
        record.write_bytes(record.read_bytes()[:-9])
    else:
        said = json.loads(record.read_text())
        said["sources"] = {name: item[:3] for name, item in said["sources"].items()}
        record.write_text(json.dumps(said if why == "incomplete" else {**said, "reader": "0" * 64}))
    assert parsed_again(monkeypatch)


def test_a_folder_that_cannot_be_written_costs_only_time(record: Path) -> None:
    record.parent.write_bytes(b"")
    assert digest(BASE)
    source.save()


def test_a_record_does_not_grow_without_end(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_SOURCES", 3)
    for number in range(5):
        facts(f"a = {number}".encode())
        source.save()
        assert len(json.loads(record.read_text())["sources"]) <= 3


def test_an_environment_that_is_refused_elsewhere_is_not_refused_here(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMC_THREADS", "none")
    assert os.environ["LLMC_THREADS"]
    assert digest(BASE)


def test_where_others_may_write_to_the_cache_the_record_is_in_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("LLMC_CACHE_DIR", str(shared))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    facts(b"shared = 1")
    source.save()
    assert not list(shared.iterdir())
    assert (tmp_path / "llmc" / "sources.json").is_file()
