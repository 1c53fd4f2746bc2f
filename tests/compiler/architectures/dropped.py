"""A family's file that is there for one test."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from llmc.compiler import architectures
from tests.compiler import tiny


def drop_in(name: str, text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a family's file where families are looked for, and take its tiny configuration among the others."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.setattr(architectures, "__path__", [*architectures.__path__, str(folder)])
    importlib.invalidate_caches()
    module = f"{architectures.__name__}.{name}"
    found = importlib.import_module(module)
    del sys.modules[module]
    monkeypatch.setitem(sys.modules, module, found)  # and takes it out again
    monkeypatch.setitem(tiny.ARCHITECTURES, name, tiny.of_family(name))
