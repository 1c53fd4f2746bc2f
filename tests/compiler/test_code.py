"""What makes a result is found by reading sources, and nothing is left out."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

import llmc
from llmc.artifacts.key import Difference, Key, changed_code, describe
from llmc.artifacts.store.store import Store
from llmc.compiler import code
from llmc.compiler.code import facts
from llmc.compiler.pipeline import verification
from llmc.compiler.targets.base import Target
from llmc.compiler.targets.fake import FakeTarget
from llmc.compiler.verification.verify import Verification
from tests.compiler.keyed import Compiled
from tests.tiers import default_cases, full
from tests.toy import Toy

SOURCES = Path(llmc.__file__).parent
MODULES = sorted(
    ".".join(["llmc", *(part for part in path.relative_to(SOURCES).with_suffix("").parts if part != "__init__")])
    for path in SOURCES.rglob("*.py")
)


# What a module imports


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., code.Source]]:
    """Reads modules of a package that a test writes: name to source."""
    monkeypatch.setattr(code, "ROOT", tmp_path)
    code.forget()

    def write(files: Mapping[str, str], module: str) -> code.Source:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        code.forget()
        return code.source_of(module)

    yield write
    code.forget()


def test_imports_are_found_wherever_they_are(written: Callable[..., code.Source]) -> None:
    text = (
        "if TYPE_CHECKING:\n    from llmc.b import B\n\n    from llmc.c import C\nfrom llmc.d import (\n"
        "    D,  # why\n    e,\n)\nfrom ..i import j, K\nfrom . import l\ntry:\n    import llmc.m\nfinally:\n    pass\n"
        "def f():\n    import llmc.b as b, llmc.c\n    from llmc import g\n    from .l.n import o\n"
    )
    others = ("g.py", "d/__init__.py", "d/e.py", "i/__init__.py", "i/j.py", "x/l/__init__.py")
    found = written({"x/a.py": text, **dict.fromkeys(others, "")}, "llmc.x.a")
    assert found.at_top == {"llmc.d", "llmc.d.e", "llmc.i", "llmc.i.j", "llmc.x.l", "llmc.m"}
    assert found.later == {"llmc.b", "llmc.c", "llmc.g", "llmc.x.l.n"}


def test_a_package_imports_relative_to_itself(written: Callable[..., code.Source]) -> None:
    assert written({"x/__init__.py": "from .a import b\n", "x/a.py": ""}, "llmc.x").at_top == {"llmc.x.a"}


CHAIN = {
    "top.py": "from llmc.near import near\n\n\ndef top():\n    from llmc.lazy import lazy\n    return near(lazy)\n",
    "near.py": "from .constants import SIZE\n\n\ndef near(x):\n    return x * SIZE\n",
    "constants.py": "SIZE = 8\n",
    "lazy.py": "from pathlib import Path\nlazy = Path(__file__).with_name('table.json')\n",
    "table.json": "1\n",
    "unrelated.py": "from llmc.top import top\n",
}


@pytest.mark.parametrize("edited", CHAIN)
def test_a_change_of_what_is_imported_reaches_all_that_imports_it(
    edited: str, written: Callable[..., code.Source]
) -> None:
    """A constant over a relative import, what a function imports, a file that is read."""
    written(CHAIN, "llmc.top")
    before = code.code_digest("llmc.top")
    written({edited: f"# A comment.\n\n{CHAIN[edited]}"} if edited.endswith(".py") else {}, "llmc.top")
    assert code.code_digest("llmc.top") == before
    written({edited: CHAIN[edited] + "EDITED = 2\n"}, "llmc.top")
    after = code.code_digest("llmc.top")
    assert (after != before) == (edited != "unrelated.py")
    found = changed_code(Difference("code", after, before))
    assert found == {"unrelated.py": [], "table.json": ["lazy"]}.get(edited, [edited.removesuffix(".py")])


def test_a_module_that_is_named_in_a_string_counts_and_one_of_a_registry_does_not(
    written: Callable[..., code.Source],
) -> None:
    found = written(
        {"a.py": 'ONE = "llmc.b"\nKNOWN = {"c": "llmc.c:C"}\nNONE = "llmc.gone"\n', "b.py": "", "c.py": ""}, "llmc.a"
    )
    assert found.later == {"llmc.b"}


def test_a_package_that_imports_its_modules_when_requested_a_name_counts_with_all_of_them(
    written: Callable[..., code.Source],
) -> None:
    found = written({"a/__init__.py": "_HOMES = {}\n\n\ndef __getattr__(name):\n    pass\n", "a/b.py": ""}, "llmc.a")
    assert found.later == {"llmc.a.b"}


def test_modules_of_a_package_that_are_imported_by_a_name_that_is_put_together_count_all_of_them(
    written: Callable[..., code.Source],
) -> None:
    text = 'def get(name):\n    return import_module(f"{}.{name}").FAMILY\n'
    files = {"a/b.py": "", "a/c.py": "", "a/d/e.py": "", "a/__init__.py": text.replace("{}", "{__name__}")}
    assert written({**files, "get.py": text.replace("{}", "llmc.a")}, "llmc.get").later == {"llmc.a.b", "llmc.a.c"}
    assert code.source_of("llmc.a").later == {"llmc.a.b", "llmc.a.c"}


@pytest.mark.parametrize("beside", ["table.json", "source/kernel.c", "source/deep/kernel.h"])
def test_files_beside_a_module_that_looks_for_them_count(beside: str, written: Callable[..., code.Source]) -> None:
    text = 'TABLE = Path(__file__).with_name("table.json")\nSOURCE = Path(__file__).parent / "source"\n'
    files = {"a/b.py": text, "a/table.json": "1", "a/source/kernel.c": "1", "a/source/deep/kernel.h": "1", "a/x": "1"}
    before = written(files, "llmc.a.b")
    assert written({f"a/{beside}": "2"}, "llmc.a.b").digest != before.digest
    assert written({f"a/{beside}": "1", "a/x": "2"}, "llmc.a.b").digest == before.digest


def test_every_file_that_comes_with_the_package_and_shapes_results_counts() -> None:
    """Files that are no Python: those of the kernels, and the measurements that choose an engine, are seen."""
    for module, name in (
        ("llmc.compiler.targets.onnxruntime.kernels.build", "linear.c"),
        ("llmc.compiler.targets.cpu", "cpu_measurements.json"),
    ):
        path = code._path(module)
        assert name in {file.name for file in code._files_beside(path, facts(path.read_bytes()).files)}


# What is left out


@full
def test_a_class_counts_with_those_that_it_inherits_from_and_a_name_with_its_module() -> None:
    """And a name in another package with the whole package."""
    assert code._own(FakeTarget) == {FakeTarget.__module__, Target.__module__}
    assert FakeTarget.__module__ in code.closure(FakeTarget.__module__)
    assert code.closure("numpy.linalg") == ["numpy"]


def test_what_is_left_out_is_met_and_leads_to_nothing_else() -> None:
    """A stop that nothing reaches is none; and behind none of them lies code that makes results."""
    reached = {name for module in MODULES for name in (code.source_of(module).at_top | code.source_of(module).later)}
    for stop in code.STOPS:
        assert any(name == stop or name.startswith(f"{stop}.") for name in reached), stop
    behind, pending = set[str](), [module for module in MODULES if code.stopped(module)]
    while pending:
        source = code.source_of(pending.pop())
        new = {name for name in source.at_top | source.later if not code.stopped(name)} - behind
        behind |= new
        pending += new
    assert {name for name in behind if name.startswith(("llmc.compiler.", "llmc.runtime."))} <= {
        "llmc.compiler.checkpoint.base",  # stages.py: what a configuration says of its place
        "llmc.runtime.cache_shape",  # what families say caches in: a component by value
        "llmc.compiler.frontend.consumed",  # consumed.py: refuses what contradicts itself
        "llmc.compiler.model_size",  # stages.py: what entries say of their size
        "llmc.runtime.host",  # costs.py: how much memory this host has, for estimates
        *ARCHITECTURES,  # model_size.py: their sizes alone; consumed.py: their names of keys and tensors
    }


ARCHITECTURES = {module for module in MODULES if module.startswith("llmc.compiler.architectures")}
HANDED_IN = {
    "trace": (  # its configuration and the shape of its cache, which are components by value
        "llmc.compiler.checkpoint.",
        "llmc.compiler.architectures.shared.cache",
        "llmc.compiler.architectures.shared.architectures",
    ),
    "executable": ("llmc.compiler.pipeline.executors.",),  # call the target
}


@default_cases(1)
@pytest.mark.parametrize("device", ["fake", "cpu"])
def test_no_code_runs_in_a_build_that_its_key_does_not_name(
    device: str, compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every function of llmc that is called while a result is made is of a module in its `code`, or of a stop."""
    keyed, _ = compiled(device)
    ran: dict[str, set[str]] = {}
    named: dict[str, set[str]] = {}

    def noted(key: Key) -> Key:
        named.setdefault(key.kind, set()).update(f"llmc.{word.partition('=')[0]}" for word in words(key))
        return key

    def watching(kind: str, make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **options: watched(ran.setdefault(kind, set()), make, *given, **options)

    real = Store.get_or_build
    monkeypatch.setattr(
        Store, "get_or_build",
        lambda self, key, build: real(self, key, build if key.is_local else watching(noted(key).kind, build)),
    )  # fmt: skip
    make = verification._key
    monkeypatch.setattr(verification, "_key", lambda *given: noted(make(*given)))
    for part in ("bucket", "greedy", "accuracy"):
        monkeypatch.setattr(Verification, part, watching("verify", getattr(Verification, part)))
    if device != "fake":  # the tracer calls torch, which takes minutes when it is watched; what it imports is read
        from llmc.compiler.frontend import trace

        for name in ("trace", "trace_weightless"):
            monkeypatch.setattr(trace, name, unwatched(getattr(trace, name)))
    keyed._requested(keyed.store, keyed.model, keyed.plan, {})
    Toy(keyed.model, Store(tmp_path / "store"), tmp_path / "bundle", keyed.plan).compile(
        **{"verify": "all", "jobs": 1, **keyed.options}
    )
    assert {"executable", "weights", "verify", "reference"} <= set(ran)
    for kind, modules in ran.items():
        assert any(not code.stopped(module) for module in modules), f"nothing was seen of {kind}"
        makers = {module for module in modules if not module.startswith(HANDED_IN.get(kind, ()))}
        assert {module for module in makers if not code.stopped(module)} <= named[kind], kind


def words(key: Key) -> list[str]:
    return str(key.components.get("code", "")).split()[1:]


def watched(seen: set[str], function: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """Call a function, and note the modules of llmc whose functions it calls, in whatever thread."""

    def see(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("llmc.") and frame.f_code.co_name != "<module>":
            seen.add(name)

    threading.setprofile(see)
    sys.setprofile(see)
    try:
        return function(*given, **options)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any, **options: Any) -> Any:
        see = sys.getprofile()
        sys.setprofile(None)
        try:
            return function(*given, **options)
        finally:
            sys.setprofile(see)

    return call


# How it is told


def test_a_changed_module_is_reported_by_name() -> None:
    whole = "sha256:" + "0" * 64
    one, other = f"{whole} compiler.a=1 compiler.b=1 compiler.c=1", f"{whole} compiler.a=2 compiler.b=1 compiler.d=1"
    assert changed_code(Difference("code", one, other)) == ["compiler.a", "compiler.c", "compiler.d"]
    assert describe([Difference("code", one, other)]) == "code: compiler.a, compiler.c, compiler.d"
    assert changed_code(Difference("code", whole, other)) == [], "an entry of before modules were named"
    assert changed_code(Difference("isa", one, other)) == []


def test_the_digest_in_front_is_over_whole_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The short ones are for people: sources whose first digits agree are still different."""
    digests = iter(["ab" * 32, "ab" * 16 + "cd" * 16])
    monkeypatch.setattr(code, "closure", lambda *_: ["llmc.x"])
    sources = SimpleNamespace(read=lambda _: code.Source(next(digests), frozenset(), frozenset()))
    monkeypatch.setattr(code, "source_of", sources.read)
    one, other = code._component(["llmc.x"]), code._component(["llmc.x"])
    assert one.split()[1:] == other.split()[1:]
    assert one != other


def test_a_folder_that_an_older_version_left_is_not_taken_for_a_package(
    written: Callable[..., code.Source],
) -> None:
    """Of a package that became a module: git removes its sources, and not what Python compiled of them."""
    found = written({"a.py": "from llmc.parts import NAMES\n", "parts.py": "", "parts/__pycache__/x.pyc": ""}, "llmc.a")
    assert found.at_top == {"llmc.parts"}
    assert code.source_of("llmc.parts").at_top == set()
