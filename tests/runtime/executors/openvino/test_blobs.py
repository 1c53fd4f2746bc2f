"""The file of a model that was compiled for a device: read back as written, refused when it is anything else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.artifacts.bundle.trust import HEAD_BYTES, code_in
from llmc.errors import ArtifactError
from llmc.runtime.executors.envelope import write_envelope
from llmc.runtime.executors.openvino import device
from llmc.runtime.executors.openvino.blobs import FORM, DeviceBlob, reason_of
from tests.runtime.executors.openvino.fake_devices import NO_LIBRARY, FakeCore

BLOB = DeviceBlob("NPU", {"platform": "4000"}, b"<net/>", b"\x7fELF and more")
facts = st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3)


@given(st.builds(DeviceBlob, st.sampled_from(["GPU", "NPU"]), facts, st.binary(), st.binary()))
def test_it_is_read_as_it_was_written(blob: DeviceBlob) -> None:
    assert DeviceBlob.parse(blob.to_bytes(), "bundle/1") == blob


@pytest.mark.parametrize(
    "header",
    [
        {}, {"device": "CPU", "built_for": {}}, {"device": "NPU"}, {"device": "NPU", "built_for": {"platform": 4000}},
        {"device": ["NPU"], "built_for": {}},
    ],
)  # fmt: skip
def test_a_header_with_something_else_is_refused(header: dict[str, Any]) -> None:
    with pytest.raises(ArtifactError, match=r"^bundle/1: damaged, .*its header lacks device or built_for"):
        DeviceBlob.parse(write_envelope(header, {"ir": b"", "native": b""}, FORM), "bundle/1")


def test_the_file_of_an_older_llmc_is_named_so() -> None:
    with pytest.raises(ArtifactError, match="LLMCOVD1', which an older llmc wrote; compile it again"):
        DeviceBlob.parse(b"LLMCOVD1" + bytes(64), "bundle/1")


def test_it_counts_as_code() -> None:
    assert code_in(BLOB.to_bytes()[:HEAD_BYTES]) == "a model that OpenVINO compiled for a device"


@pytest.mark.parametrize(
    ("core", "words"),
    [
        (FakeCore(npu="5010"), r"bundle/1: compiled for another device \(platform 4000, here 5010\); compile again"),
        (FakeCore(npu="4000"), r"OpenVINO .* cannot open it on NPU: .*UNSUPPORTED_FEATURE; compile again"),
    ],
)
def test_another_device_is_named(core: FakeCore, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_core", lambda: core)
    native = b'\x7fELF{"facts": {"platform": "3720"}, "xml": 0}\n'
    with pytest.raises(ArtifactError, match=words):
        DeviceBlob("NPU", {"platform": "4000"}, b"<net/>", native).open_on("NPU", "bundle/1", "llmc compile m")
    with pytest.raises(ArtifactError, match=r"compiled for another device \(a NPU, and opened on GPU\)"):
        BLOB.open_on("GPU", "bundle/1", "llmc compile m")


def test_a_reason_is_without_token_slots_in_openvinos_source() -> None:
    assert "core.cpp" not in reason_of(RuntimeError(NO_LIBRARY))
    assert reason_of(RuntimeError("")) == "no reason given"
