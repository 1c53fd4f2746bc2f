"""What is written into a compile cache is seen, wherever the toolchain keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.runtime.certificate import monitors
from llmc.runtime.certificate.monitors import CacheFileMonitor, cache_locations, unkept
from llmc.settings import Settings
from tests.fakes import nvidia


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "triton"
    (folder / "KEY").mkdir(parents=True)
    (folder / "KEY" / "kernel.cubin").write_bytes(b"old")
    return folder


@pytest.fixture
def monitor(cache: Path) -> CacheFileMonitor:
    monitor = CacheFileMonitor({"triton": cache, "cuda": cache.with_name("missing")})
    monitor.start()
    assert monitor.count() == 0
    return monitor


def test_a_new_file_is_seen(cache: Path, monitor: CacheFileMonitor) -> None:
    (cache / "OTHER").mkdir()
    (cache / "OTHER" / "kernel.json").write_text("{}")
    assert monitor.what() == ("triton: OTHER/kernel.json",)
    assert monitor.count() == 1, "and not again"


def test_a_file_that_is_replaced_or_changed_in_place_is_seen(cache: Path, monitor: CacheFileMonitor) -> None:
    kernel = cache / "KEY" / "kernel.cubin"
    (cache / "new").write_bytes(b"old")
    (cache / "new").replace(kernel)
    assert monitor.what() == ("triton: KEY/kernel.cubin",)
    kernel.write_bytes(b"new")
    assert monitor.count() == 2


def test_reading_a_file_and_removing_one_is_not_writing(cache: Path, monitor: CacheFileMonitor) -> None:
    (cache / "KEY" / "kernel.cubin").read_bytes()
    (cache / "KEY" / "kernel.cubin").unlink()
    assert monitor.count() == 0


def test_a_cache_that_appears_is_seen(cache: Path, monitor: CacheFileMonitor) -> None:
    cache.with_name("missing").mkdir()
    (cache.with_name("missing") / "index").write_bytes(b"")
    assert monitor.what() == ("cuda: index",)


def test_links_are_not_followed(cache: Path, monitor: CacheFileMonitor, tmp_path: Path) -> None:
    (cache / "loop").symlink_to(cache)
    assert monitor.what() == ("triton: loop",)


def test_it_is_blind_where_a_cache_cannot_be_read_or_is_too_large(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> object:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(monitors.os, "scandir", refuse)
        monitor = CacheFileMonitor({"triton": cache})
        monitor.start()
        assert monitor.count() is None
        assert "triton cannot be read" in monitor.blind()
    monkeypatch.setattr(monitors, "MOST_FILES", 0)
    large = CacheFileMonitor({"triton": cache})
    large.start()
    assert large.count() is None
    assert "more than 0 files" in large.blind()


def test_the_token_slots_are_those_that_toolchains_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = {
        "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "torch inductor", "JAX_COMPILATION_CACHE_DIR": "jax",
        "VLLM_CACHE_ROOT": "vllm", "NEURON_COMPILE_CACHE_URL": "neuron", "CUDA_CACHE_PATH": "cuda",
    }  # fmt: skip
    for variable, name in reported.items():
        monkeypatch.setenv(variable, str(tmp_path / name))
    monkeypatch.setenv("PT_HPU_RECIPE_CACHE_CONFIG", f"{tmp_path / 'gaudi'},True,1024")
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "store"))
    offsets = cache_locations(Settings.from_environment(), "cpu")
    for name in (*reported.values(), "gaudi"):
        assert offsets[name] == tmp_path / name
    assert offsets["llmc's blobs"].is_relative_to(tmp_path / "store")
    assert "vllm-neuron" not in offsets, "it lies in vllm's"


def test_the_token_slots_have_defaults_and_a_remote_one_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("TRITON_CACHE_DIR", "TRITON_HOME", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", "s3://bucket/cache")
    offsets = cache_locations(Settings.from_environment(), "cpu")
    assert offsets["triton"] == tmp_path / ".triton/cache"
    assert offsets["cuda"] == tmp_path / ".nv/ComputeCache"
    assert offsets["torch inductor"].name.startswith("torchinductor_")
    assert "neuron" not in offsets


def test_what_the_driver_of_a_accelerator_compiles_is_a_file_unless_its_cache_is_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvidia.install(monkeypatch, nvidia.H100)
    monkeypatch.setenv("CUDA_CACHE_PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_CACHE_DISABLE", raising=False)
    seen = CacheFileMonitor({"cuda": cache_locations(Settings.from_environment(), "cuda")["cuda"]}, unkept())
    seen.start()
    assert seen.count() == 0
    (tmp_path / "6").mkdir()
    (tmp_path / "6" / "ptx").write_bytes(b"compiled")
    assert seen.what() == ("cuda: 6/ptx",)

    monkeypatch.setenv("CUDA_CACHE_DISABLE", "1")
    assert CacheFileMonitor({}, unkept()).count() is None
    nvidia.install(monkeypatch)
    assert unkept() == ""
