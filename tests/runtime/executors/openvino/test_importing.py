"""Opening OpenVINO imports what replays graphs, and takes nothing from who else uses it in the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("openvino")

CONVERTER = {"openvino.tools.ovc", "numpy.ma", "urllib.request", "ssl", "http.client", "zipfile"}


def child(code: str) -> list[str]:
    """Words that a process prints; warnings of packages are none of ours."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout.split()


def test_the_converter_is_not_imported_until_it_is_called() -> None:
    code = """
import sys
import llmc.runtime.executors.openvino.executor
print(*[name for name in sys.modules if name in %r])
print("|")
import openvino
try:
    openvino.convert_model("no such model")
except Exception as error:
    print(type(error).__module__, "openvino.tools.ovc" in sys.modules, openvino.convert_model.__module__)
"""
    before, after = " ".join(child(code % CONVERTER)).split("|")
    assert before.split() == []
    assert after.split()[1:] == ["True", "openvino.tools.ovc.convert"]


def test_an_openvino_that_is_there_already_is_left_alone() -> None:
    code = """
import sys, openvino
before = openvino.convert_model
import llmc.runtime.executors.openvino
print(openvino.convert_model is before, sys.modules["openvino.tools.ovc"] is not None)
"""
    assert child(code) == ["True", "True"]


def test_it_may_be_missing() -> None:
    code = """
import sys
sys.modules["openvino"] = None
import llmc.runtime.executors.openvino
print("openvino.tools.ovc" in sys.modules)
"""
    assert child(code) == ["False"]
