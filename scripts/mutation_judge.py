"""Runs the nearest tests against mutants, in copies of a checkout, and says which mutants they kill."""

from __future__ import annotations

import json
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from scripts.import_graph import ImportGraph

_PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
_MARKS = shlex.split(_PROJECT["tool"]["pytest"]["ini_options"]["addopts"])
TIERS: dict[str, list[str]] = {
    "default": [],
    "full": ["-m", _MARKS[_MARKS.index("-m") + 1].removeprefix("not full and ")],
}
"""pytest's options for each tier; `full` is that of `make test-all`."""
BATCHES = (4, 16, 64)
"""Test files of the first processes of a mutant; one more runs all others. Few first: collecting takes time."""
PASSED = (0, 5)
"""pytest's exit codes where no test failed; 5: no test was selected."""
NOT_COPIED = frozenset({".git", ".mypy_cache", ".ruff_cache", ".hypothesis", ".bench", "demo", "site", "build", "dist"})
MARK = "MUTATION_RUN"
"""The environment variable by which processes that tests start are found again."""
PLUGIN = Path(__file__).with_name("mutation_plugin.py")


class Run(NamedTuple):
    """A run of pytest; `code` is None at the limit. `culprit`: arguments that select what failed, or ran last."""

    code: int | None
    culprit: list[str]
    seconds: float


class Verdict(NamedTuple):
    """What tests say of a mutant: "killed", "survived", or "survived (time)" with tests left at the limit.

    `by` is the test that killed it, or that ran at the limit.
    """

    status: str
    by: str
    seconds: float


class Judge:
    """Runs tests in copies of the checkout `root`, made below `scratch`, `limit_s` seconds at most for a mutant."""

    def __init__(self, root: Path, scratch: Path, jobs: int, limit_s: float) -> None:
        self._scratch, self._limit_s = scratch, limit_s
        self._clean = scratch / "clean"
        shutil.copytree(root, self._clean, symlinks=True, ignore=lambda folder, names: _ignored(root, folder, names))
        subprocess.run([sys.executable, "-m", "compileall", "-q", "llmc"], cwd=self._clean, check=True)
        (scratch / "plugin").mkdir()
        shutil.copy2(PLUGIN, scratch / "plugin")
        self._graph = ImportGraph(self._clean)
        self._copies: queue.Queue[Path] = queue.Queue()
        for number in range(jobs):
            self._copies.put(Path(shutil.copytree(self._clean, scratch / f"copy{number}", symlinks=True)))
        self._quiet: dict[tuple[str, ...], Run] = {}
        self._left_out: frozenset[str] = frozenset()
        self._stopped = threading.Event()
        self._mark = uuid.uuid4().hex

    def verdict(self, file: str, source: bytes, mutated: bytes, tier: str) -> Verdict:
        """Run the nearest tests of a tier with `mutated` in the place of a file's source."""
        tree = self._copies.get()
        try:
            _write(tree / file, mutated)
            return self._judged(tree, nearest_tests(self._graph, self._clean, file), tier)
        finally:
            _write(tree / file, source)
            self._copies.put(tree)

    def stop(self) -> None:
        """End all runs, whose `verdict` raises KeyboardInterrupt."""
        self._stopped.set()
        _kill(self._mark)

    def _judged(self, tree: Path, tests: list[str], tier: str) -> Verdict:
        spent = 0.0
        batches = list(_batches(tests))
        while batches:
            left_out = self._left_out
            wanted = [test for test in batches[0] if test not in left_out]
            run = self._run(tree, tier, wanted, self._limit_s - spent) if wanted else Run(0, [], 0)
            spent += run.seconds
            if run.code in PASSED:
                del batches[0]
            elif run.code is None:
                hung = self._hangs(tree, tier, run.culprit)
                return Verdict("killed" if hung else "survived (time)", run.culprit[-1], spent)
            elif self._without_mutant(tier, run.culprit).code in PASSED:
                return Verdict("killed", run.culprit[-1], spent)
            elif len(run.culprit) > 2 or run.culprit[-1] in left_out:
                raise RuntimeError(f"pytest fails without a mutant: {' '.join(run.culprit)}")
            else:
                spent -= run.seconds
                print(f"left out, since it fails without a mutant: {run.culprit[-1]}", flush=True)
                self._left_out |= {run.culprit[-1]}
        return Verdict("survived", "", spent)

    def _hangs(self, tree: Path, tier: str, culprit: list[str]) -> bool:
        """Whether what ran at the limit fails, or takes much longer than without the mutant."""
        quiet = self._without_mutant(tier, culprit)
        allowed = 3 * quiet.seconds + self._limit_s / 12
        return quiet.code in PASSED and self._run(tree, tier, culprit, allowed).code not in PASSED

    def _without_mutant(self, tier: str, culprit: list[str]) -> Run:
        key = (tier, *culprit)
        if key not in self._quiet:
            self._quiet[key] = self._run(self._clean, tier, culprit, self._limit_s)
        return self._quiet[key]

    def _run(self, tree: Path, tier: str, arguments: list[str], limit_s: float) -> Run:
        own = Path(tempfile.mkdtemp(dir=self._scratch))
        mark, log = f"{self._mark} {own.name}", own / "log"
        command = [
            sys.executable, "-m", "pytest", "-x", "-p", PLUGIN.stem, "-p", "no:randomly", "--hypothesis-seed=0",
            f"--basetemp={own / 'tmp'}", *TIERS[tier], *arguments,
        ]  # fmt: skip
        environment = {
            **os.environ, MARK: mark, "MUTATION_LOG": str(log), "MUTATION_LEFT_OUT": json.dumps([*self._left_out]),
            "PYTHONPATH": os.pathsep.join([str(tree), str(self._scratch / "plugin")]),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(own / "hypothesis"), "ORT_DISABLE_TELEMETRY": "1",
        }  # fmt: skip
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment.pop("PYTEST_ADDOPTS", None)
        if self._stopped.is_set():
            raise KeyboardInterrupt
        began = time.monotonic()
        process = subprocess.Popen(
            command, cwd=tree, env=environment, start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            code = process.wait(max(limit_s, 0))
        except subprocess.TimeoutExpired:
            code = None
        run = Run(code, _culprit(log, arguments), time.monotonic() - began)
        _kill(mark)
        process.wait()
        shutil.rmtree(own, ignore_errors=True)
        if self._stopped.is_set():
            raise KeyboardInterrupt
        return run


def nearest_tests(graph: ImportGraph, root: Path, file: str) -> list[str]:
    """The test files that import a module: those of the mirrored name first, then those of the mirrored folder, then
    those with the fewest imports between, and the smaller one of two alike."""
    module = graph.module_of(file)
    hops = graph.hops([module] if module else [])
    folder = Path("tests", *Path(file).parts[1:-1])
    named = folder if file.endswith("__init__.py") else folder / Path(file).stem

    def location(test: str) -> tuple[bool, bool, int, int, str]:
        is_named = test.startswith(f"{named.parent.as_posix()}/test_{named.name}")
        return not is_named, Path(test).parent != folder, hops[test], (root / test).stat().st_size, test

    return sorted(hops, key=location)


def _ignored(root: Path, folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name in NOT_COPIED or name.startswith(".venv")] if Path(folder) == root else []


def _culprit(log: Path, arguments: list[str]) -> list[str]:
    """pytest's arguments for what a log says failed, or else began last; all of them where nothing had begun."""
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    for what in ("fails", "not collected", "begins"):
        if tests := [test for kind, test in lines if kind == what]:
            return ["--collect-only", tests[0]] if what == "not collected" else [tests[-1]]
    return ["--collect-only", *(one for one in arguments if one != "--collect-only")]


def _batches(tests: list[str]) -> Iterator[list[str]]:
    begin = 0
    for size in (*BATCHES, len(tests)):
        if tests[begin:]:
            yield tests[begin : begin + size]
        begin += size


def _write(file: Path, source: bytes) -> None:
    """Write a module, and forget its bytecode: two writes in a second, of one size, look the same to Python."""
    file.write_bytes(source)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink(missing_ok=True)


def _kill(mark: str) -> None:
    """Kill the processes of a run, or of all; those that began a session of their own included."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK, "").startswith(mark):
                process.send_signal(signal.SIGKILL)
        except psutil.Error:
            continue
