"""What counts as native code (bundle/trust.py), against every target, stage and executor that there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import llmc
from llmc.artifacts.bundle.trust import (
    CODE_FILES,
    DATA_EXECUTORS,
    DATA_KINDS,
    DATA_TARGETS,
    HEAD_BYTES,
    code_in,
    code_of_bundle,
    code_of_entry,
)
from llmc.compiler.targets import devices, open_target
from llmc.runtime import executors
from llmc.runtime.executors import encoders
from llmc.runtime.executors.base import EXECUTABLES
from tests.artifacts.helpers import DIGESTS, key, manifest

ROOT = Path(llmc.__file__).parent
CODE_KINDS = {"executable", "finish", "hyperdex", "kernels", "on-target", "slots", "starter"}
"""Kinds of entries that need a signature, "executable" unless it is portable; a new kind is named here, or is data."""

CLASSES = {
    **dict.fromkeys(executors.EXECUTORS.names(), executors.executor_class),
    **dict.fromkeys(encoders.ENCODERS.names(), encoders.encoder_class),
}
EXECUTORS = sorted(CLASSES)


def portable(**changes: object) -> dict[str, object]:
    executables = [{**item, "state": "portable"} for item in manifest().to_dict()["executables"]]
    return {"executables": executables, **changes}


def test_every_stage_is_data_or_code() -> None:
    sources = [path.read_text() for path in ROOT.rglob("*.py")]
    found = {kind for text in sources for kind in re.findall(r"(?:stages\.run|\bKey)\(\s*\"([a-z0-9_-]+)\"", text)}
    assert {kind for kind in found if not kind.startswith("local-")} == (DATA_KINDS | CODE_KINDS)


@pytest.mark.parametrize("kind", [*sorted(CODE_KINDS), "a-kind-of-tomorrow"])
def test_what_is_not_known_to_be_data_is_code(kind: str) -> None:
    assert code_of_entry(key(kind, target="a-target-of-tomorrow"), {})
    assert code_of_entry(key(kind), {"state": "native"})
    assert code_of_entry(key(kind, state="a-state-of-tomorrow"), {})


def test_data_that_says_it_is_code_is_code() -> None:
    assert code_of_entry(key("weights"), {}) is None
    assert code_of_entry(key("weights"), {"state": "native"})


@pytest.mark.parametrize("device", [*devices(), "openvino:NPU", "openvino:GPU"])
def test_portable_executables_of_a_target_are_data_and_others_are_not(device: str) -> None:
    target = open_target(device) if device != "tpu" else open_target("tpu:v5e-2x2")
    code = code_of_entry(key(target=target.description.name, state=target.state), {"state": target.state})
    assert (code is None) == (target.state == "portable")
    assert target.state == "native" or target.description.name in DATA_TARGETS


@pytest.mark.parametrize("name", EXECUTORS)
def test_every_executor_says_what_it_loads_as_code(name: str) -> None:
    opens = CLASSES[name](name).description.opens
    code = {file for file, content in opens.items() if content == "code"}
    assert EXECUTABLES in opens
    if name in DATA_EXECUTORS:
        assert EXECUTABLES not in code and code <= CODE_FILES
    for file in code:
        files = {} if file == EXECUTABLES else {file: DIGESTS["decode"]}
        assert code_of_bundle(manifest(**portable(executor=name, files=files))), file


def test_an_executor_that_is_not_known_runs_code() -> None:
    assert set(EXECUTORS) > DATA_EXECUTORS
    for name in DATA_EXECUTORS:
        assert code_of_bundle(manifest(**portable(executor=name))) is None
    assert code_of_bundle(manifest(**portable(executor="onnxruntime2")))


@pytest.mark.parametrize("file", ["kernels", "portable.json", "recipes.json", "starter.json"])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_file_of_code_makes_every_bundle_native(file: str, executor: str) -> None:
    assert code_of_bundle(manifest(**portable(executor=executor, files={file: DIGESTS["weights"]})))


def test_one_native_executable_is_enough() -> None:
    members = portable()
    members["executables"][-1]["state"] = "native"  # type: ignore[index]
    assert code_of_bundle(manifest(**members))


def test_code_is_known_by_how_it_begins() -> None:
    libraries = [Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line]
    assert code_in(libraries[0].read_bytes()[:HEAD_BYTES]) == "a shared library (ELF)"
    pe = b"MZ".ljust(60, b"\0") + (128).to_bytes(4, "little")
    neff = (2).to_bytes(8, "little") + (1024).to_bytes(8, "little") + bytes(48)
    for head in (pe, neff, b"\xcf\xfa\xed\xfe".ljust(64), b"LLMCXLA2", b"RR_UPCVO", b"!<arch>\n", b"BC\xc0\xde"):
        assert code_in(head), head
    for head in (b"", b"MZ", b"{}", b"<?xml", b"PK\3\4", bytes(64), b"\x08\x07", b"MZ".ljust(64, b"\xff")):
        assert code_in(head) is None, head
