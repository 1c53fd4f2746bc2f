"""A bundle of cuda on a GPU host: contract-tested over a fake NVML and a fake client of the card, not run on hardware.

The bundle is a real one, whose machine code XLA made for an H100; where the card would run it, this CPU runs the
portable programs of the same files.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.bundle.manifest import Manifest
from llmc.artifacts.store.store import Store
from llmc.buckets.bucket import Bucket
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan, Provenance
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.errors import ArtifactError, DeviceError, InputError, LlmcError, OutOfDeviceMemoryError
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.xla import client
from llmc.runtime.executors.xla.executor import CudaExecutor
from llmc.runtime.executors.xla.hosts import HOSTS, CudaHost, host_for, needs_of
from llmc.runtime.llm import BundleLLM
from llmc.runtime.startup.opening import EngineOptions
from llmc.runtime.startup.opening import open_executor as open_started
from llmc.settings import Settings
from llmc.testing.executors import TOP
from tests.compiler import tiny
from tests.compiler.targets.xla.unoptimised import unoptimised
from tests.fakes import nvidia, pynvml, xla_gpu
from tests.fakes.nvidia import H100, H100_OTHER, L40S
from tests.tiers import full

pytestmark = [full, pytest.mark.skipif(find_spec("jax_cuda13_plugin") is None, reason="XLA's plug-in is not installed")]
GIB = 1 << 30
PLAN = Plan(
    Limits(32, 2, 32, 8),
    (Bucket("prompt", 1, 32, 0), Bucket("prompt", 1, 8, 24), Bucket("decode", 2, 1, 32)),
    Provenance("test"),
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuda")
    model = tiny.write_model(folder / "llama", "llama")
    requested = CompileOptions("cuda:h100", "none", verify="none", sample_top_k=TOP)
    with unoptimised():
        compile_bundle(str(model), folder / "bundle", PLAN, requested, Store(folder / "store"), lambda _: None)
    return folder / "bundle"


@pytest.fixture(scope="module")
def learnt(bundle: Path) -> xla_gpu.FakeCudaHost:
    host = xla_gpu.FakeCudaHost()
    with unoptimised():
        host.learn(Bundle.open(bundle))
    return host


@pytest.fixture
def gpu(learnt: xla_gpu.FakeCudaHost, monkeypatch: pytest.MonkeyPatch) -> xla_gpu.FakeCudaHost:
    """A host with one H100, and jax with its plug-in."""
    nvidia.install(monkeypatch, H100)
    xla_gpu.install(monkeypatch, learnt)
    learnt.loaded = 0
    return learnt


def tokens(bundle: Path) -> list[list[int]]:
    """Of three requests at once over two rows, one sampled from the top logits, two with a prefix in common."""
    sampled = SamplingParams(max_tokens=6, temperature=0.7, top_k=4, seed=3, ignore_eos=True)
    greedy = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    shared = [7, 80, 3, 9, 41, 5, 17, 23, 11] * 2
    with BundleLLM(bundle) as llm:
        before = llm.compilations
        first = llm.generate([[*shared, 1]], greedy)
        rest = llm.generate([[*shared, 2], [4, 4, 4], [*shared, 1]], [greedy, sampled, greedy])
        assert llm.compilations == before
        assert rest[0].num_cached_tokens > 0
    return [list(r.outputs[0].token_ids) for r in [*first, *rest]]


def test_batches_prefixes_and_top_k_over_a_gpu_s_executables_give_the_tokens_of_the_cpu(
    bundle: Path, gpu: xla_gpu.FakeCudaHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device = tokens(bundle)
    assert gpu.loaded > 0
    monkeypatch.setenv("LLMC_OPEN_PORTABLE", "1")
    with unoptimised():
        assert tokens(bundle) == on_device
    assert on_device[0] == on_device[3]


def test_machine_code_of_this_version_is_opened_and_nothing_is_compiled(
    bundle: Path, gpu: xla_gpu.FakeCudaHost
) -> None:
    open_executor(Bundle.open(bundle)).close()  # JAX compiles what allocates the cache once a process
    gpu.loaded = 0
    executor = open_executor(Bundle.open(bundle))
    executor.open_all()

    assert gpu.loaded == len(Bundle.open(bundle).manifest.executables) + 4
    assert executor.compilations.count == 0
    assert executor.capabilities.in_place_of == ""
    assert [w.count() for w in executor.compilations.monitors] == [0, 0]
    executor.close()


def test_what_another_plug_in_built_is_compiled_on_the_gpu_counted_and_warned_of(
    bundle: Path, gpu: xla_gpu.FakeCudaHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    version = client.metadata.version
    monkeypatch.setattr(client.metadata, "version", lambda n: "0.10.3" if n == "jax-cuda13-pjrt" else version(n))
    with unoptimised():
        executor = open_executor(Bundle.open(bundle))
        executor.open_all()

    assert gpu.loaded == 0
    assert executor.compilations.count == len(Bundle.open(bundle).manifest.executables) + 4
    assert "are compiled here from their portable programs" in caplog.text
    executor.close()


def test_without_a_gpu_the_cpu_opens_its_portable_programs_and_the_log_says_so(
    bundle: Path, gpu: xla_gpu.FakeCudaHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with caplog.at_level(logging.WARNING), unoptimised():
        executor = open_started(Bundle.open(bundle), EngineOptions())
    assert (executor.capabilities.in_place_of, gpu.loaded) == ("NVIDIA GPU", 0)
    assert "compiled for cuda:h100, and this host has no NVIDIA GPU: it is opened on the CPU" in caplog.text
    executor.close()


def test_the_portable_half_is_opened_on_the_cpu_beside_a_gpu_too(bundle: Path, gpu: xla_gpu.FakeCudaHost) -> None:
    opened = Bundle.open(bundle)
    assert host_for(opened) is gpu
    requested = Bundle(opened.files, replace(Settings.from_environment({}), open_portable=True))
    assert host_for(requested) is HOSTS["cpu"]


FULL = pynvml.Device(used=80 * GIB - (1 << 20))


@pytest.mark.parametrize(
    ("gpus", "driver", "cuda", "error", "words"),
    [
        ([L40S], "580.95.05", 13000, ArtifactError, "H100 80GB HBM3, compute capability 9.0; GPU 0"),
        ([H100], "570.86.10", 12080, DeviceError, "driver 570.86.10 knows CUDA up to 12.8; install driver 580"),
        ([FULL], "580.95.05", 13000, OutOfDeviceMemoryError, r"\(weights [\d.]+ KiB, cache .*more than is free: 1 MiB"),
    ],
)
def test_a_gpu_that_cannot_run_it_is_named_before_anything_is_loaded(
    bundle: Path, gpu: xla_gpu.FakeCudaHost, monkeypatch: pytest.MonkeyPatch, gpus: list[pynvml.Device], driver: str,
    cuda: int, error: type[LlmcError], words: str,
) -> None:  # fmt: skip
    nvidia.install(monkeypatch, *gpus, driver=driver, cuda=cuda)
    monkeypatch.setattr(gpu, "open", lambda *_: pytest.fail("JAX was started"))
    with pytest.raises(error, match=words):
        open_executor(Bundle.open(bundle))


def test_more_gpus_than_the_host_has_are_named(
    bundle: Path, gpu: xla_gpu.FakeCudaHost, changed: Callable[..., Bundle]
) -> None:
    with pytest.raises(DeviceError, match="needs 2 NVIDIA GPUs, this process has 1"):
        gpu.require(changed(tensor_parallel=2))


def test_the_memory_that_counts_is_what_xla_may_take_of_a_gpu(
    bundle: Path, gpu: xla_gpu.FakeCudaHost, monkeypatch: pytest.MonkeyPatch, changed: Callable[..., Bundle]
) -> None:
    needs = {"weights": 70 * GIB, "cache": 4 * GIB, "temporary": 0, "code": 0}
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    with pytest.raises(OutOfDeviceMemoryError, match=r"needs 74 GiB .* 2 GiB more than is free: 72 GiB"):
        gpu.require(changed(device_memory=needs))
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.95")
    gpu.require(changed(device_memory=needs))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    with pytest.raises(InputError, match="both set"):
        gpu.require(changed(device_memory=needs))


def test_the_memory_of_a_client_that_runs_already_is_what_its_pool_has_free(
    gpu: xla_gpu.FakeCudaHost, monkeypatch: pytest.MonkeyPatch, changed: Callable[..., Bundle]
) -> None:
    nvidia.install(monkeypatch, FULL, H100_OTHER)
    monkeypatch.setattr(CudaHost, "_pools", lambda self: {0: 10 * GIB})
    gpu.require(changed())
    with pytest.raises(OutOfDeviceMemoryError, match="more than is free: 10 GiB"):
        gpu.require(changed(device_memory={"weights": 11 * GIB, "cache": 0, "temporary": 0, "code": 0}))


@pytest.mark.parametrize(
    "damage",
    [
        {"gpu": None}, {"gpu": {"product": "x", "compute_capability": "nine"}}, {"device_memory": {"weights": 1}},
        {"device_memory": {"weights": -1, "cache": 0, "temporary": 0, "code": 0}},
        {"gpu": {"product": 7, "compute_capability": "9.0"}},
    ],
)  # fmt: skip
def test_a_manifest_that_does_not_say_what_it_needs_is_refused(
    changed: Callable[..., Bundle], damage: dict[str, Any]
) -> None:
    with pytest.raises(ArtifactError, match="does not name its GPU"):
        needs_of(changed(**damage))


def test_what_xla_refuses_to_read_is_an_error_with_its_words(
    bundle: Path, gpu: xla_gpu.FakeCudaHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "require", lambda _: None)
    nvidia.install(monkeypatch, L40S)
    with pytest.raises(
        ArtifactError, match=r"XLA cannot open .*\(serialized: 9\.0, target: 8\.9\).*compile the bundle"
    ):
        open_executor(Bundle.open(bundle))
    monkeypatch.setattr(gpu, "_known", {})
    with pytest.raises(ArtifactError, match="incompatible PjRt client type"):
        open_executor(Bundle.open(bundle))


def test_a_gpu_without_jax_s_plug_in_is_an_error_with_the_line_that_installs_it(
    gpu: xla_gpu.FakeCudaHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmc.runtime.executors.xla.hosts.find_spec", lambda _: None)
    with pytest.raises(DeviceError, match=r"no plug-in for it; install it with pip install 'jax\[cuda13\]==[\d.]+'"):
        gpu.here()


def test_a_client_that_does_not_open_is_an_error_with_jax_s_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")

    def refuse(*_: object) -> None:
        raise RuntimeError("Unable to initialize backend 'cuda':\n no cuDNN")

    monkeypatch.setattr("llmc.runtime.executors.xla.hosts.open_client", refuse)
    with pytest.raises(DeviceError, match=r"backend 'cuda': no cuDNN; install it with .*CUDA's libraries"):
        CudaHost().open(1, 1)


@pytest.mark.parametrize(("stated", "used"), [(None, "0.9"), ("0.5", "0.5")])
def test_jax_is_reported_which_gpus_and_how_much_of_them_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, stated: str | None, used: str
) -> None:
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    if stated:
        monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", stated)
    reported: dict[str, Any] = {}
    monkeypatch.setattr(
        "llmc.runtime.executors.xla.hosts.before_start", lambda _, option, value: reported.update({option: value})
    )
    monkeypatch.setattr("llmc.runtime.executors.xla.hosts.open_client", lambda *_: [])
    CudaHost().open(2, 1)
    assert reported == {"jax_platforms": "cuda,cpu", "jax_cuda_visible_devices": "0,1"}
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == used


def test_a_certificate_names_gpu_and_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia.install(monkeypatch, H100, H100_OTHER)
    assert CudaExecutor.description.host() == {
        "gpu": "NVIDIA H100 80GB HBM3", "compute capability": "9.0", "driver": "580.95.05",
    }  # fmt: skip
    nvidia.install(monkeypatch)
    assert CudaExecutor.description.host() == {}


@pytest.fixture
def changed(bundle: Path) -> Callable[..., Bundle]:
    """The bundle, whose manifest says otherwise of its card, its memory or its options."""

    def change(**to: Any) -> Bundle:
        opened = Bundle.open(bundle)
        members = opened.manifest.to_dict()
        options = members["options"]
        for name, value in to.items():
            (options["analysis"] if name in ("gpu", "device_memory") else options)[name] = value
        opened.files.manifest = Manifest(members)
        return opened

    return change
