"""Breaks each promise of docs/guarantees.md in a copy of the code, and sees whether a test notices.

    python scripts/check_promises.py [--promise P1] …

The tests named in promises.toml run once on the code as it is, where all must pass, and then once for each mutation,
where one must fail. Prints a line for each; exits 1 when a mutation is not caught, or when the text that it changes
is no longer there once. Takes some minutes.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MUTATIONS = ROOT / "scripts" / "promises.toml"
PACKAGE = Path("llmc", "artifacts")
TESTS = Path("tests", "artifacts")
COPIED = ("llmc", "tests", "scripts", "pyproject.toml")
TOO_LONG = 300
PASSED, FAILED = 0, 1


class Mutation(NamedTuple):
    """One way to break a promise; see promises.toml."""

    promise: str
    what: str
    file: str
    old: str
    new: str
    tests: list[str]


def read_mutations() -> list[Mutation]:
    """All of promises.toml, in its order."""
    return [Mutation(**item) for item in tomllib.loads(MUTATIONS.read_text())["mutation"]]


def run_tests(folder: Path, tests: Iterable[str], limit_s: int | None = TOO_LONG) -> tuple[int | None, str]:
    """pytest's exit code, None when it took longer than `limit_s`, and the end of what it said."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        *(str(TESTS / test) for test in tests),
    ]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=limit_s, check=False, text=True)
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout[-2000:]


def problem_of(folder: Path, mutation: Mutation) -> str | None:
    """Why a mutation is not caught; None when it is. The file is as it was afterwards."""
    file = folder / PACKAGE / mutation.file
    text = file.read_text() if file.exists() else ""
    if text.count(mutation.old) != 1:
        return f"its text is in {mutation.file} {text.count(mutation.old)} times: mend {MUTATIONS.name}"
    file.write_text(text.replace(mutation.old, mutation.new))
    try:
        code, _ = run_tests(folder, mutation.tests)
    finally:
        file.write_text(text)
    if code == PASSED:
        return f"{', '.join(mutation.tests)} passed"
    return None if code in (FAILED, None) else f"pytest could not run (exit code {code}): mend {MUTATIONS.name}"


def main() -> int:
    """Check all, or those of the promises that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--promise", action="append", help="only this one, as P1; may be given several times")
    wanted = parser.parse_args().promise
    chosen = [mutation for mutation in read_mutations() if wanted is None or mutation.promise in wanted]
    bad = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for item in COPIED:
            source = ROOT / item
            copy = shutil.copytree if source.is_dir() else shutil.copy2
            copy(source, folder / item)
        tests = sorted({test for mutation in chosen for test in mutation.tests})
        code, said = run_tests(folder, tests, None)  # all of them, on a host however busy
        if code != PASSED:
            print(f"{said}\nthe tests do not pass on the code as it is: see to that first", file=sys.stderr)
            return 1
        for mutation in chosen:
            began = time.monotonic()
            problem = problem_of(folder, mutation)
            bad += problem is not None
            seconds = f"{time.monotonic() - began:.0f} s"
            verdict = f"caught, {seconds}" if problem is None else f"NOT CAUGHT: {problem}"
            print(f"{mutation.promise:4} {mutation.what}: {verdict}", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} caught")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
