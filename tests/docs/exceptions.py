"""Calls of llmc in documents that no test runs as they stand, each rule with its reason."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeAlias

from tests.docs.commands import DOCUMENTS, OF_PACKAGES, ROOT, Shown, llmc_arguments, shown

Rule: TypeAlias = Callable[[Shown, list[str]], bool]

PAGES = ("ci", "cpu-server", "quickstart", "tune-vllm")
"""Pages that running.py runs, on the demo model or what their reader brings, and whose output it compares."""

EXCEPTIONS: dict[str, Rule] = {
    "runs as a page: test_pages.py, test_first_minutes.py": lambda one, _: of_page(one),
    "a package of somebody's own: test_outside_target.py, test_outside_strategy.py": lambda _, call: bool(
        OF_PACKAGES & set(call)
    ),
    "a Ray cluster of several hosts": lambda _, call: "--address" in call,
    "torch-xla, in an environment of its own (make torch-xla-env)": lambda _, call: "--lowering" in call,
    "a build of torch for CUDA, on the GPU's host": lambda one, call: (
        "--resume" in call and one.document.name == "cuda.md"
    ),
    "kernels are timed on the GPU": lambda _, call: call[0] == "tune" or "--tuning" in call,
}


def of_page(one: Shown) -> bool:
    """Whether a page's own test runs a line."""
    return one.language != "sh" and one.document in [ROOT / "docs" / f"{name}.md" for name in PAGES]


def why_not(one: Shown, arguments: list[str]) -> str | None:
    """Why a call is not rehearsed; None: it is."""
    return next((reason for reason, rule in EXCEPTIONS.items() if rule(one, arguments)), None)


@cache
def all_calls() -> list[tuple[Shown, list[str]]]:
    """Every call of llmc in a document."""
    return [(one, call) for document in DOCUMENTS for one in shown(document) for call in llmc_arguments(one.line)]
