"""What llmc may use of this CPU: all that it has, or what LLMC_CPU_ISA leaves of it."""

from __future__ import annotations

import pytest

from llmc.artifacts.bundle.kernel_sets import KERNEL_SETS, best_set
from llmc.errors import InputError
from llmc.runtime import host
from llmc.settings import CPU_ISA

AVX2 = ("avx", "avx2", "f16c", "fma")
AVX512 = ("avx512_vnni", "avx512bw", "avx512dq", "avx512f", "avx512vl")
AMX = ("amx_bf16", "amx_int8", "amx_tile")
XEON = ("x86_64", *sorted((*AMX, *AVX512, *AVX2, "avx512_bf16", "avx_vnni")))
GRAVITON = ("aarch64", "asimd", "asimddp", "asimdhp", "bf16", "i8mm", "sve")


@pytest.fixture
def xeon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with AMX."""
    monkeypatch.setattr(host, "host_features", lambda: XEON)


def limited(monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[str, ...]:
    monkeypatch.setenv(CPU_ISA, name)
    return host.cpu_features()


@pytest.mark.usefixtures("xeon")
@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("avx2", AVX2), ("avx-vnni", ("avx_vnni", *AVX2)), ("avx512-vnni", (*AVX512, *AVX2)),
        ("avx512-bf16", ("avx512_bf16", *AVX512, *AVX2)), ("amx-int8", (*AMX, "avx512_bf16", *AVX512, *AVX2)),
        ("amx", (*AMX, "avx512_bf16", *AVX512, *AVX2)), (" AVX2 ", AVX2),
    ],
)  # fmt: skip
def test_a_limit_leaves_what_its_set_needs_and_no_more(
    monkeypatch: pytest.MonkeyPatch, name: str, left: tuple[str, ...]
) -> None:
    assert limited(monkeypatch, name) == ("x86_64", *sorted(left))


@pytest.mark.parametrize("name", [s.name for s in KERNEL_SETS])
def test_the_set_that_a_limit_names_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    there = next(s for s in KERNEL_SETS if s.name == name)
    monkeypatch.setattr(host, "host_features", lambda: XEON if there.machine == "x86_64" else GRAVITON)
    assert best_set(limited(monkeypatch, name)) == there


@pytest.mark.parametrize("name", ["", " "])
def test_without_a_limit_all_is_left(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert limited(monkeypatch, name) == host.host_features()


@pytest.mark.parametrize(
    ("here", "name", "message"),
    [
        (("x86_64", *AVX512, *AVX2), "amx",
         "amx: this CPU lacks amx_bf16, amx_int8, amx_tile, avx512_bf16; set avx512-vnni or avx2, or unset it"),
        (("x86_64", *AVX2), "avx-vnni", "avx-vnni: this CPU lacks avx_vnni; set avx2, or unset it"),
        (GRAVITON, "avx2", "avx2: this CPU lacks avx2, f16c, fma, x86_64; set neon-i8mm or neon-dotprod, or unset it"),
        (("arm64",), "neon-dotprod", "neon-dotprod: this CPU lacks aarch64, asimddp, asimdhp; unset it"),
        (("x86_64", *AVX2), "avx512",
         "'avx512' is not one of amx-int8, avx512-bf16, avx512-vnni, avx-vnni, avx2, neon-i8mm, neon-dotprod; "
         "set avx2, or unset it"),
    ],
)  # fmt: skip
def test_what_the_host_does_not_run_and_what_nobody_knows_is_refused(
    monkeypatch: pytest.MonkeyPatch, here: tuple[str, ...], name: str, message: str
) -> None:
    monkeypatch.setattr(host, "host_features", lambda: here)
    with pytest.raises(InputError) as refused:
        limited(monkeypatch, name)
    assert str(refused.value) == f"LLMC_CPU_ISA={message}"
