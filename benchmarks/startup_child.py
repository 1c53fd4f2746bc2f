"""The traced process of startup.py: makes a bundle's first token, and says when phases ran and files were opened.

    python startup_child.py {api|cli} STARTED REPORT BUNDLE PROMPT

STARTED is time.perf_counter() in the parent when it started this process; REPORT, the file that gets JSON:
{"phases": [[name, thread, start ms, end ms]…], "files": [[path, bytes, ms]…]}. Functions are wrapped as their modules
are imported, so that the order of imports stays what it is.
"""

from __future__ import annotations

import time

_ENTERED = time.perf_counter()

# ruff: noqa: E402 - the interpreter's phase ends before anything else is imported
import _thread
import functools
import json
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path

WAY, _STARTED, REPORT, BUNDLE, PROMPT = sys.argv[1:6]
STARTED = float(_STARTED)
MAIN = _thread.get_ident()
PACKAGES = (
    "llmc.api", "llmc.runtime.bundle", "llmc.runtime.offline", "numpy", "onnxruntime", "openvino", "tokenizers",
    "jinja2",
    "typer", "pydantic",
)  # fmt: skip
"""Whose import is a phase."""
CALLS = {
    "llmc.runtime.bundle": [("Bundle", "open", "open the bundle")],
    "llmc.runtime.text.tokenizer": [("Tokenizer", "__init__", "read the tokenizer")],
    "llmc.runtime.text.chat": [("ChatTemplate", "__init__", "compile the chat template")],
    "llmc.runtime.prompts": [("Prompts", "encode", "encode the prompt")],
    "llmc.runtime.startup.overlapped": [("StartingExecutor", "_open", "open the executor")],
    "llmc.runtime.engine.batched_core": [("BatchedCore", "step", "first step")],
    "llmc.runtime.engine.sampling.batch": [("", "sample", "sample"), ("", "sample_top", "sample")],
}
"""Module → (class or "", function, phase)."""

phases: list[list] = [["interpreter", "main", 0.0, 1e3 * (_ENTERED - STARTED)]]
files: list[tuple[str, float]] = []


def phase(name: str, start: float) -> None:
    thread = "main" if _thread.get_ident() == MAIN else "beside"
    phases.append([name, thread, 1e3 * (start - STARTED), 1e3 * (time.perf_counter() - STARTED)])


def timed(function, name):
    @functools.wraps(function)
    def run(*args, **kwargs):
        start = time.perf_counter()
        try:
            result = function(*args, **kwargs)
        finally:
            phase(name, start)
        if name == "open the executor":
            for method in ("run", "run_top"):
                setattr(type(result), method, timed(getattr(type(result), method), "prefill"))
        return result

    return run


class Timed(Loader):
    """Runs a module as its own loader does, times it, and wraps what is of interest in it."""

    def __init__(self, loader) -> None:
        self.loader = loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module) -> None:
        start = time.perf_counter()
        self.loader.exec_module(module)
        module.__spec__.loader = module.__loader__ = self.loader
        if module.__name__ in PACKAGES:
            phase(f"import {module.__name__}", start)
        for owner, function, name in CALLS.get(module.__name__, ()):
            home = getattr(module, owner) if owner else module
            own = vars(home)[function]
            wrapped = timed(own.__func__ if isinstance(own, classmethod) else own, name)
            setattr(home, function, classmethod(wrapped) if isinstance(own, classmethod) else wrapped)


class Finder(MetaPathFinder):
    """Finds what others find, for the modules of interest."""

    def find_spec(self, name, path=None, target=None):
        if name in PACKAGES or name in CALLS:
            for finder in sys.meta_path:
                spec = None if finder is self else finder.find_spec(name, path, target)
                if spec is not None and spec.loader is not None:
                    spec.loader = Timed(spec.loader)
                    return spec
        return None


def opened(event: str, args: tuple) -> None:
    if event == "open" and isinstance(args[0], str | bytes):
        files.append((os.fsdecode(args[0]), 1e3 * (time.perf_counter() - STARTED)))


def report() -> None:
    seen = [[path, size(path), at] for path, at in files]
    Path(REPORT).write_text(json.dumps({"phases": phases, "files": seen}))


def size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0


def api() -> None:
    from llmc.api import LLM
    from llmc.runtime.engine.sampling.params import SamplingParams

    llm = LLM(BUNDLE)
    prompt = {"messages": [{"role": "user", "content": PROMPT}]}
    for _, update, _ in llm.stream([prompt], SamplingParams(max_tokens=8, temperature=0)):
        if update.text:
            start = time.perf_counter()
            print(update.text, flush=True)
            phase("print", start)
            break
    report()
    llm.close()


def cli() -> None:
    from llmc.cli.main import main

    sys.argv[0] = "llmc"
    main(["generate", BUNDLE, "--chat", "--max-tokens", "1", "--prompt", PROMPT, "-q"])
    report()


if __name__ == "__main__":
    sys.addaudithook(opened)
    sys.meta_path.insert(0, Finder())
    {"api": api, "cli": cli}[WAY]()
