"""A finished executable of AOTInductor: read as written, and refused on a host that it is not for."""

from __future__ import annotations

from typing import Any

import pytest

from llmc.artifacts.bundle.trust import HEAD_BYTES, code_in
from llmc.errors import ArtifactError
from llmc.runtime.executors.envelope import write_envelope
from llmc.runtime.executors.inductor.package import FORM, SIZES, Package
from llmc.runtime.executors.whole_step.step import AcceleratorArray
from tests.runtime.executors.inductor.test_archive import PACKAGE

HERE = {
    "torch": "2.11.0", "cuda": "13.0", "compute_capability": "9.0", "driver": "580.95.05",
    "gpu": "NVIDIA H100 80GB HBM3",
}  # fmt: skip
NUMBERS = dict.fromkeys(SIZES, 4)
CACHE = [AcceleratorArray("kv", "f32", (4, 1, 16), (0, 1)), AcceleratorArray("state", "bf16", (3, 96), (2,))]
TEXTS = ["kv f32 [2, slots, 4, 1, 16]", "state bf16 [1, slots, 3, 96]"]


def package(**built_for: str) -> Package:
    built = {**HERE, **built_for}
    return Package("cuda", built, NUMBERS, tuple(TEXTS), memoryview(b"a program"), memoryview(PACKAGE))


def test_it_is_read_as_it_was_written_and_counts_as_code() -> None:
    data = package().to_bytes()
    assert Package.parse(data, "bundle/1") == package()
    assert code_in(data[:HEAD_BYTES]) == "code that AOTInductor compiled"


@pytest.mark.parametrize(
    "change",
    [
        {"device": "rocm"}, {"device": None}, {"device": ["cuda"]}, {"built_for": None}, {"built_for": {"torch": 2}},
        {"sizes": []}, {"sizes": {**NUMBERS, "capacity": "4"}}, {"sizes": {"batch": 4}}, {"cache": TEXTS[0]},
        {"cache": [4]},
    ],
)  # fmt: skip
def test_a_header_with_something_else_is_refused(change: dict[str, Any]) -> None:
    header = {"device": "cuda", "built_for": HERE, "sizes": NUMBERS, "cache": TEXTS} | change
    with pytest.raises(ArtifactError, match=r"^bundle/1: damaged, .*lacks device, .* sizes or cache; finish"):
        Package.parse(write_envelope(header, {"package": PACKAGE, "program": b""}, FORM), "bundle/1")


def test_a_section_that_is_no_package_is_refused_before_torch_sees_it() -> None:
    header = {"device": "cuda", "built_for": HERE, "sizes": NUMBERS, "cache": TEXTS}
    for content in (b"", b"\x7fELF", PACKAGE[:-1]):
        with pytest.raises(ArtifactError, match="bundle/1: not an AOTInductor package of llmc"):
            Package.parse(write_envelope(header, {"package": content, "program": b""}, FORM), "bundle/1")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"torch": "2.13.0"}, "compiled for torch 2.11.0, this host has 2.13.0"),
        ({"cuda": "12.8"}, "compiled for CUDA 13.0, this host has 12.8"),
        (
            {"compute_capability": "8.9", "gpu": "NVIDIA L40S"},
            "compiled for compute capability 9.0, this host has 8.9",
        ),
        ({"driver": "570.10"}, "compiled for driver 580.95.05, this host has 570.10"),
        ({"gpu": "NVIDIA H200"}, "compiled for gpu NVIDIA H100 80GB HBM3, this host has NVIDIA H200"),
    ],
)
def test_another_torch_cuda_or_gpu_is_named(other: dict[str, str], words: str) -> None:
    package().require_here(HERE, "bundle/1")
    with pytest.raises(
        ArtifactError, match=f"^bundle/1: {words}; compile the bundle again here: llmc compile --resume"
    ):
        package().require_here({**HERE, **other}, "bundle/1")
    with pytest.raises(ArtifactError, match="this host has none"):
        package().require_here({}, "bundle/1")


@pytest.mark.parametrize("torch", ["2.10.1", "2.14.0", "3.0", "", "nightly"])
def test_a_package_of_a_release_that_is_not_known_is_refused(torch: str) -> None:
    with pytest.raises(ArtifactError, match="whose packages llmc does not know"):
        package(torch=torch).require_here({**HERE, "torch": torch}, "bundle/1")


@pytest.mark.parametrize("name", SIZES)
def test_a_step_of_other_sizes_never_reaches_its_code(name: str) -> None:
    package().require_sizes(NUMBERS, CACHE, "bundle/1")
    with pytest.raises(ArtifactError, match=f"compiled for {name} 4, opened for {name} 5; compile the bundle"):
        package().require_sizes({**NUMBERS, name: 5}, CACHE, "bundle/1")


@pytest.mark.parametrize(
    "other", [CACHE[:1], CACHE[::-1], [CACHE[0], AcceleratorArray("state", "f32", (3, 96), (2,))], [CACHE[0], CACHE[0]]]
)
def test_a_cache_of_other_arrays_never_reaches_its_code(other: list[AcceleratorArray]) -> None:
    words = r"for a cache of kv f32 \[2, slots, 4, 1, 16\]; state bf16 \[1, slots, 3, 96\], opened for a cache of "
    with pytest.raises(ArtifactError, match=words):
        package().require_sizes(NUMBERS, other, "bundle/1")
