"""A family whose file is there for one test."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from llmc.compiler import architectures
from tests.compiler import tiny


def drop_in(name: str, file: str, text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a family's file where families are looked for, and list it and its tiny configuration with the others."""
    (folder / f"{file}.py").write_text(text)
    monkeypatch.setattr(architectures, "__path__", [*architectures.__path__, str(folder)])
    monkeypatch.setitem(architectures.FILES, name, file)
    importlib.invalidate_caches()
    module = f"{architectures.__name__}.{file}"
    found = importlib.import_module(module)
    del sys.modules[module]
    monkeypatch.setitem(sys.modules, module, found)  # and takes it out again
    monkeypatch.setitem(tiny.ARCHITECTURES, name, tiny.of_architecture(name))
