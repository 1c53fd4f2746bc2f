"""Prints the test files that a change can affect, nearest first, one a line.

    python -m scripts.affected_tests --since origin/main

The change is what differs from the merge base with --since, uncommitted and untracked files included. Without such a
base (a shallow clone, a new branch) all test files are printed. A change affects:

- of a Python file: the tests that import it, over any number of modules (import_graph.py), and itself if it is a test;
- of another file in a package, or a deleted one: the tests that import anything from that package;
- of a file of EVERYTHING: all tests, the unrelated ones last;
- of any other file: the tests that name it or its folder, or import a script that does, and tests/docs for a page.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.import_graph import ImportGraph

ROOT = Path(__file__).resolve().parents[1]
EVERYTHING = frozenset({"pyproject.toml", "requirements.lock"})
"""Files on which every test depends."""
PAGES = (".md", ".ipynb", "mkdocs.yml")
FAR = sys.maxsize
"""The distance of a test that nothing but EVERYTHING connects with a change."""


def changed_files(root: Path, since: str) -> list[str] | None:
    """The files that differ from the merge base of HEAD and `since`, relative to the root; None without a base."""

    def git(*arguments: str) -> str | None:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)  # noqa: S607
        return done.stdout if done.returncode == 0 else None

    base = git("merge-base", since, "HEAD")
    if base is None:
        return None
    differ = git("diff", "-z", "--name-only", "--no-renames", "--relative", base.strip())
    untracked = git("ls-files", "-z", "--others", "--exclude-standard")
    return sorted({name for names in (differ, untracked) for name in (names or "").split("\0") if name})


def affected_tests(root: Path, changed: Sequence[str] | None) -> list[str]:
    """The test files that a change affects, nearest first; of those as near, the smaller first."""
    graph = ImportGraph(root)
    tests = graph.test_files()
    modules: set[str] = set()
    for file in changed or ():
        if module := graph.module_of(file) or graph.package_of(file):
            modules.add(module)
        else:
            modules |= graph.naming(_words(file))
        if file.endswith(PAGES):
            modules |= {module for test, module in tests.items() if test.startswith("tests/docs/")}
    hops = graph.hops(modules)
    if changed is None or EVERYTHING.intersection(changed):
        hops = dict.fromkeys(tests, FAR) | hops
    return sorted(hops, key=lambda test: (hops[test], (root / test).stat().st_size, test))


def _words(file: str) -> list[str]:
    """What tests call a file: its name, unless that is a common word (`.ci/run`), and its folder, unless
    that is the whole project's or the pages'."""
    path = Path(file)
    names = [path.name] if path.suffix or path.name[0].isupper() else []
    folder = path.parts[0] if file.startswith(".") else path.parent.as_posix()
    return names if folder in (".", "docs") else [*names, folder]


def main() -> None:
    """Print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", required=True, metavar="REF", help="what the change is compared with")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout (default: this one)")
    options = parser.parse_args()
    root = options.root.resolve()
    changed = changed_files(root, options.since)
    if changed is None:
        print(f"no merge base with {options.since}: all test files", file=sys.stderr)
    for test in affected_tests(root, changed):
        print(test)


if __name__ == "__main__":
    main()
