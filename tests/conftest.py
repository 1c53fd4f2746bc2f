"""Hooks and fixtures of all tests: tiers, shards, the order of files, and the summary at the end of a run."""

from __future__ import annotations

import gc
import os
import re
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, settings

import llmc  # noqa: F401 - before onnxruntime, whose telemetry it turns off
from llmc.cpus import usable_cpus
from tests import tiers

# no deadline: the duration of an example depends on the machine's load
settings.register_profile(tiers.FULL, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(tiers.DEFAULT, settings.get_profile(tiers.FULL), max_examples=tiers.DEFAULT_EXAMPLES)

PACKAGES = (
    "chromium", "docker-registry", "fish", "g++", "libc6-arm64-cross", "openssl", "qemu-user", "skopeo",
    "strace", "zsh",
)  # fmt: skip
"""Debian's packages that tests use; .ci/run installs them."""

HEAVY = frozenset({"jax", "jaxlib", "onnxruntime", "openvino", "torch", "torch_xla"})
"""What no test of the fast tier imports."""

FAST = (
    "api", "fleet", "integrations", "artifacts/bundle", "artifacts/third_party", "artifacts/gc", "artifacts/local",
    "artifacts/overview", "artifacts/signing", "artifacts/store", "artifacts/test_digest.py", "artifacts/test_key.py",
    "artifacts/test_stamps.py", "buckets", "compiler/estimates", "compiler/verification", "runtime/confined",
    "runtime/engine", "runtime/disaggregated", "runtime/startup", "runtime/text", "runtime/test_bundle.py",
    "runtime/test_llm.py", "runtime/test_step.py", "server/telemetry", "test_settings.py", "test_cpus.py",
    "test_promises.py",
)  # fmt: skip
"""The fast tier (`make test-fast`): folders and files below tests/ that need the fake target and numpy."""

SLOW = (
    "api/test_api.py", "artifacts/bundle/test_bundle_processes.py", "artifacts/third_party/test_unpacking.py",
    "artifacts/gc/test_collect_model.py", "artifacts/gc/test_collect_processes.py",
    "artifacts/local/test_precompiled.py",
    "artifacts/store/test_store_faults.py", "artifacts/store/test_store_processes.py",
    "buckets/cost/test_bench.py", "buckets/evaluation/test_replay.py", "buckets/optimise/test_parts.py",
    "buckets/optimise/test_solver.py", "buckets/planner/test_bucket_file.py", "buckets/planner/test_choice.py",
    "buckets/report/test_plan_view.py", "buckets/report/test_plots.py", "buckets/strategies/test_outside_strategy.py",
    "buckets/test_coverage.py", "buckets/test_lookup.py", "buckets/traffic/test_memory.py",
    "buckets/traffic/test_schedule.py",
    "compiler/estimates/test_durations.py", "compiler/estimates/test_footprint.py",
    "compiler/verification/test_accuracy.py", "compiler/verification/test_beyond.py",
    "compiler/verification/test_layers.py",
    "compiler/verification/test_parts.py", "compiler/verification/test_parts_outcomes.py",
    "runtime/engine/sampling/test_filters.py", "runtime/engine/sampling/test_constraints.py",
    "runtime/engine/sampling/test_sample.py", "runtime/engine/scheduling/test_simulation.py",
    "runtime/engine/test_speculation_steps.py", "runtime/engine/test_async_engine.py",
    "runtime/disaggregated/test_pairs.py",
    "runtime/startup/test_starting.py", "runtime/text/test_answers_text.py", "runtime/text/test_chat.py",
    "runtime/text/test_tokenizer.py", "runtime/text/test_vocabulary.py", "server/telemetry/test_request_spans.py",
    "server/telemetry/test_recorder.py",
)  # fmt: skip
"""Files of these folders that take several seconds, or import more."""


SERVERS = "servers"
_SHARES_SERVERS = re.compile(
    r"from tests\.farm import .*\bFarm\b|from tests\.server\.served import|def test_\w+\([^)]*\bserved\b"
)


class NoHeavyPackages:
    """Refuses to import what the fast tier does without, to whatever test asks for it."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] in HEAVY:
            raise ImportError(f"the fast tier imports no {name}: list the test's file in SLOW of tests/conftest.py")
        return None


@cache
def is_fast(path: Path) -> bool:
    """Whether a test file is of the fast tier."""
    tests = Path(__file__).parent
    name = path.relative_to(tests).as_posix() if path.is_relative_to(tests) else ""
    return any(name == one or name.startswith(f"{one}/") for one in FAST) and name not in SLOW


def _is_slow_folder(path: Path) -> bool:
    """Whether no file of the fast tier is below a folder of tests."""
    tests = Path(__file__).parent
    if path == tests or not path.is_relative_to(tests):
        return False
    name = path.relative_to(tests).as_posix()
    return not any(f"{name}/".startswith(f"{one}/") or one.startswith(f"{name}/") for one in FAST)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --fast other files, and the conftest.py of other folders, are not even imported: their first lines would
    import what is heavy."""
    if not config.getoption("--fast"):
        return None
    slow = _is_slow_folder(collection_path) if collection_path.is_dir() else not is_fast(collection_path)
    return True if slow else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="the fast tier alone, which imports no compiler's package")
    parser.addoption(
        "--shard", type=_shard, metavar="K/N", help="the K-th of N parts of the tests that -m and -k choose"
    )
    parser.addoption("--other-python", type=Path, help="Python of the environment that two_versions tests compare with")


def _shard(text: str) -> tuple[int, int]:
    """K of N; raises ValueError, which pytest says with the option's name."""
    number, _, count = text.partition("/")
    if not 1 <= int(number) <= int(count):
        raise ValueError(text)
    return int(number), int(count)


def _unwritten(file: Any) -> None:
    """In the place of os.fsync: the file has to be open, but nobody waits for the disk.

    That shows after a power cut only, and those tests make up (artifacts/faults/disk.py); the tens of thousands of
    waits are a tenth of the time of all tests. The processes that tests start wait as ever.
    """
    os.fstat(file if isinstance(file, int) else file.fileno())


def pytest_configure(config: pytest.Config) -> None:
    """Ctrl-C interrupts, here and in what tests start: a shell has its background jobs ignore it."""
    os.fsync = _unwritten
    settings.load_profile(tiers.DEFAULT if "not full" in config.option.markexpr else tiers.FULL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--fast"):
        sys.meta_path.insert(0, NoHeavyPackages)  # type: ignore[arg-type]


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Marks what the full suite alone runs, and in a run of all files puts those that compile first, the demo model's
    before all: a long file begun last leaves processors idle.

    With --no-loadscope-reorder workers take files in this order, not in that of the number of their tests. The shard is
    taken of what -m and -k leave.
    """
    tiers.mark_full(items)
    if config.args_source != config.ArgsSource.ARGS and not config.pluginmanager.hasplugin("randomly"):
        items.sort(key=lambda item: begins(item.path))
    yield
    if shard := config.getoption("--shard"):
        others = _of_other_shards(items, *shard)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in others])
        items[:] = [item for item in items if item.nodeid not in others]


def _of_other_shards(items: Sequence[pytest.Item], number: int, count: int) -> set[str]:
    """Node IDs of the tests that other shards run. Files are dealt out in turn, and so are architectures."""
    units = {unit: position for position, unit in enumerate(sorted({_unit(item) for item in items}))}
    return {item.nodeid for item in items if units[_unit(item)] % count != number - 1}


def _unit(item: pytest.Item) -> str:
    """What is in one shard as a whole: an architecture, or what one process runs."""
    parameters = getattr(item, "callspec", None)
    return parameters.id if parameters is not None and item.path.parent.name == "models" else unit(str(item.path))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What modules hold stays to the end: the collector walks it neither while it grows, a third of the time that
    finding the tests takes, nor when tests ask for a collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@cache
def begins(path: Path) -> int:
    """When a file begins: 0 for those on the demo model, 1 for those that compile or run what was, 2 for others."""
    text = path.read_text()
    if "pytestmark = pytest.mark.real_weights" in text:
        return 0
    return 1 if "compiler" in path.parts or _compiles(text) or _compiles(_fixtures(path.parent)) else 2


def _compiles(text: str) -> bool:
    """Whether a file takes compiled models, or a device for them, from where tests have them."""
    return "tests.compiler" in text or "tests.fakes" in text


@cache
def _fixtures(folder: Path) -> str:
    """What a folder's own conftest.py says."""
    file = folder / "conftest.py"
    return file.read_text() if file.exists() and file != Path(__file__) else ""


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A line that reproduces each failure, then the skipped tests with their reasons."""
    failed = [*terminalreporter.stats.get("failed", ()), *terminalreporter.stats.get("error", ())]
    if failed:
        terminalreporter.section("to reproduce")
        for name in dict.fromkeys(report.nodeid for report in failed):
            terminalreporter.write_line(reproduces(name, os.environ))
    skips(terminalreporter)


def reproduces(test: str, environment: Mapping[str, str]) -> str:
    """The command line that runs one test, of whatever tier, on the same instruction sets."""
    limited = f"LLMC_CPU_ISA={shlex.quote(isa)} " if (isa := environment.get("LLMC_CPU_ISA")) else ""
    return f"{limited}{os.path.relpath(sys.executable)} -m pytest -m '' {shlex.quote(test)}"


def skips(terminalreporter: Any) -> None:
    """Which tests were skipped, why, and how to have them; reasons say it as "no NAME: how to have it"."""
    reasons = Counter[str]()
    files: dict[str, set[str]] = {}
    for report in terminalreporter.stats.get("skipped", ()):
        path, _, reason = report.longrepr if isinstance(report.longrepr, tuple) else (report.nodeid, 0, "")
        reason = str(reason).removeprefix("Skipped: ")
        reasons[reason] += 1
        files.setdefault(reason, set()).add((report.nodeid or str(path)).split("::")[0])
    if not reasons:
        return
    terminalreporter.section(f"{reasons.total()} tests were skipped")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:4}  {reason}  ({', '.join(sorted(files[reason]))})")
    if wanted := [name for name in PACKAGES if any(f"apt-get install {name}" in reason for reason in reasons)]:
        terminalreporter.write_line(
            f"To have them on Debian: apt-get install {' '.join(wanted)}  (.ci/run does, as root)"
        )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadfile, one process runs all files that share servers."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByServers(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(str(super()._split_scope(nodeid)))

    return ByServers(config, log)


@cache
def unit(file: str) -> str:
    """What one process runs as a whole: a file, or all files that share the servers of tests/server, and so one Ray
    cluster."""
    return SERVERS if _SHARES_SERVERS.search(Path(__file__).parents[1].joinpath(file).read_text()) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One worker more than the CPUs that this process may use, since tests also wait for servers and processes. At most
    one for each 3 GiB of memory, which torch, JAX and OpenVINO take in one process."""
    return max(1, min(usable_cpus() + 1, psutil.virtual_memory().available // (3 << 30)))


@pytest.fixture(scope="session", autouse=True)
def _caches_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests have a store of their own. The kernels' C compiler keeps what it compiled, by content, in the environment:
    for all stores that tests make, their processes, and later runs."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    kept = Path(sys.prefix) if os.access(sys.prefix, os.W_OK) else shared
    os.environ.setdefault("ZIG_GLOBAL_CACHE_DIR", str(kept / "zig-cache"))
    os.environ["LLMC_CACHE_DIR"] = str(base / "cache")


@pytest.fixture(scope="module")
def unoptimised_xla() -> Iterator[None]:
    """What a file compiles through XLA, for tests of what is computed; see the module that this takes it from."""
    from tests.compiler.targets.xla.unoptimised import unoptimised

    with unoptimised():
        yield


@pytest.fixture(scope="module", autouse=True)
def _a_heap_of_its_own() -> Iterator[None]:
    """What a file leaves is collected when it ends: a socket that is still open is told there, not in another file.

    What it keeps, mostly modules, stays to the end, and later collections pass over it: of a whole run's heap one takes
    0.3 s, and tests ask for thousands.
    """
    yield
    gc.collect()
    gc.freeze()
