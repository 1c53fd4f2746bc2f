"""Executables over a Ray cluster: the same bytes, whatever workers die, hang, or are not what they should be."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmc import registry
from llmc.artifacts.local.opening import open_store
from llmc.artifacts.store.store import Store
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import CompileResult, compile_bundle
from llmc.compiler.pipeline.executors import ray as farming
from llmc.compiler.targets import TARGETS
from llmc.errors import ArtifactError, DeviceError, InputError
from llmc.settings import Settings
from llmc.testing.toy import toy_plan, write_toy
from tests.farm import Farm, cluster
from tests.timing import PATIENCE_S

__all__ = ["cluster"]

BUCKETS = 11


@pytest.fixture(scope="module")
def farm(cluster: Farm) -> Iterator[Farm]:
    """The cluster, whose device this process knows."""
    with pytest.MonkeyPatch.context() as here:
        here.syspath_prepend(cluster.farmed)
        here.setenv("FARMED", str(cluster.farmed))
        forget()
        yield cluster.take()
    forget()


def forget() -> None:
    """Look again for what other packages bring."""
    registry._brought.cache_clear()
    registry.packages.cache_clear()
    TARGETS.__dict__.pop("_others", None)


class Compile:
    """Compiles the toy into `folder`, by default over the cluster."""

    def __init__(self, farm: Farm, folder: Path) -> None:
        self.farm, self.folder = farm, folder
        self.model = write_toy(folder / "toy")

    def __call__(
        self, name: str = "bundle", remote: Path | None = None, device: str = "farmed", **options: object
    ) -> CompileResult:
        given = {"device": device, "verify": "none", "executor": "ray", "address": self.farm.address, **options}
        settings = Settings.from_environment({"LLMC_REMOTE_CACHE": str(remote)} if remote else {})
        requested = CompileOptions.of(**{k: v for k, v in given.items() if v is not None})
        store = Store(self.folder / f"{name}-store")
        return compile_bundle(
            str(self.model), self.folder / name, toy_plan(), requested, store, lambda _: None, settings
        )

    def blobs(self, name: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (self.folder / name).rglob("*") if len(path.name) == 64}


@pytest.fixture
def compile_(farm: Farm, tmp_path: Path) -> Compile:
    return Compile(farm, tmp_path)


@pytest.mark.full
def test_a_cluster_makes_the_bytes_that_this_host_makes(compile_: Compile) -> None:
    assert compile_("ray").built == BUCKETS
    compile_("local", executor=None, address=None)
    assert compile_.blobs("ray") == compile_.blobs("local") != {}
    assert compile_("ray").reused == BUCKETS


@pytest.mark.full
def test_a_worker_that_is_killed_while_it_compiles_is_replaced(compile_: Compile) -> None:
    (compile_.farm.farmed / "die").touch()
    assert compile_().built == BUCKETS
    assert not (compile_.farm.farmed / "die").exists()


@pytest.mark.full
def test_a_straggler_is_tried_on_another_worker(compile_: Compile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(farming.RayExecutor.__init__, "__defaults__", (None, 0.5))
    (compile_.farm.farmed / "wait").touch()
    began = time.monotonic()
    assert compile_().built == BUCKETS
    assert time.monotonic() - began < 300


@pytest.mark.full
def test_a_node_of_another_toolchain_is_named_and_not_used(compile_: Compile, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING),
        compile_.farm.node(FARMED_VERSION="2", labels={"llmc-device": "farmed"}),
        pytest.raises(DeviceError, match=r"node \w+ \(.*\): it would build another executable: .*farmed.*1.*2"),
    ):
        compile_()
    assert "is not used: it would build another executable" in caplog.text


WITHOUT = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "llmc":
            raise ModuleNotFoundError("No module named 'llmc'", name=name)

sys.meta_path.insert(0, Finder())
"""
OLDER = "import llmc.version; llmc.version.__version__ = '0.0.9'"


@pytest.mark.full
@pytest.mark.parametrize(
    ("begin", "why"),
    [
        (WITHOUT, "it does not have llmc .*: No module named 'llmc'"),
        (OLDER, "its llmc is 0.0.9, and this compile needs"),
    ],
)
def test_a_node_without_llmc_or_with_another_is_named(compile_: Compile, tmp_path: Path, begin: str, why: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(begin)
    with (
        compile_.farm.node(first=tmp_path, labels={"llmc-device": "farmed"}),
        pytest.raises(DeviceError, match=rf"node \w+ \(.*\): {why}"),
    ):
        compile_()


@pytest.mark.full
def test_a_cluster_of_another_ray_is_named(compile_: Compile, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    there = ray.__version__
    monkeypatch.setattr(ray, "__version__", "9.9.9")
    with pytest.raises(DeviceError, match=rf"Ray: {there} .* Ray: 9\.9\.9 .* Install the same Ray and Python"):
        compile_()


@pytest.mark.full
def test_a_node_without_the_device_or_the_features_that_it_claims_is_named(compile_: Compile) -> None:
    with (
        compile_.farm.node(FARMED_LACKS="no GPU is there", labels={"llmc-device": "farmed"}),
        pytest.raises(DeviceError, match=r"labelled llmc-device=farmed, and no GPU is there"),
    ):
        compile_("gpu")
    with (
        compile_.farm.node(labels={"llmc-device": "farmed", "llmc-cpu": "amx9"}),
        pytest.raises(DeviceError, match=r"labelled llmc-cpu with amx9, which its CPU does not have"),
    ):
        compile_("features")


@pytest.mark.full
def test_a_cluster_without_the_memory_that_is_requested_says_so(compile_: Compile) -> None:
    with pytest.raises(DeviceError, match=f"less than {1 << 50} bytes of memory for tasks"):
        compile_(worker_memory=1 << 50)


@pytest.mark.full
def test_workers_publish_to_a_remote_that_is_trusted_here_or_not(compile_: Compile, tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    with pytest.raises(ArtifactError, match=r"a worker published it to .*LLMC_ALLOW_UNSIGNED"):
        compile_("untrusted", remote=remote)
    settings = Settings.from_environment({"LLMC_REMOTE_CACHE": str(remote), "LLMC_ALLOW_UNSIGNED": "1"})
    options = CompileOptions.of("farmed", verify="none", executor="ray", address=compile_.farm.address)
    store = open_store(tmp_path / "other", settings)
    plan = toy_plan()
    built = compile_bundle(str(compile_.model), tmp_path / "b", plan, options, store, lambda _: None, settings)
    assert built.built + built.reused == BUCKETS


@pytest.mark.full
def test_an_interrupt_keeps_what_is_done_and_ends_what_runs(compile_: Compile, tmp_path: Path) -> None:
    (compile_.farm.farmed / "wait").touch()
    command = [
        sys.executable, "-m", "llmc", "compile", compile_.model, "--device", "farmed", "--max-model-len", "32",
        "--max-num-seqs", "4", "--executor", "ray", "--address", compile_.farm.address, "-o", tmp_path / "cut",
    ]  # fmt: skip
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": path, "LLMC_CACHE_DIR": str(tmp_path / "store")}
    child = subprocess.Popen(list(map(str, command)), env=environment, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    reported = ""
    while "[5/6]" not in reported:
        line = child.stderr.readline()
        assert line, reported
        reported += line
    child.send_signal(signal.SIGINT)
    reported += child.communicate(timeout=PATIENCE_S)[1]
    assert child.returncode == 130 and "Traceback" not in reported, reported
    assert len(Store(tmp_path / "store").entries("executable")) == 5


@pytest.mark.parametrize(
    ("address", "error", "message"),
    [
        ("127.0.0.1:1", DeviceError, r"no Ray cluster at 127.0.0.1:1: .*; start one with `ray start --head`"),
        ("nowhere", InputError, r"--address nowhere: write it as HOST:PORT"),
    ],
)
def test_a_cluster_that_is_not_there_is_one_clear_error(
    tmp_path: Path, address: str, error: type[Exception], message: str
) -> None:
    requested = CompileOptions.of("fake", executor="ray", address=address)
    model, store = write_toy(tmp_path / "toy"), Store(tmp_path / "store")
    with pytest.raises(error, match=message):
        compile_bundle(str(model), tmp_path / "bundle", toy_plan(), requested, store, lambda _: None)


def test_an_address_is_refused_where_nothing_is_sent(tmp_path: Path) -> None:
    requested = CompileOptions.of("fake", address="127.0.0.1:1")
    model, store = write_toy(tmp_path / "toy"), Store(tmp_path / "store")
    with pytest.raises(InputError, match="for a cluster; leave them out for --executor local"):
        compile_bundle(str(model), tmp_path / "bundle", toy_plan(), requested, store, lambda _: None)
    with pytest.raises(InputError, match="unknown executor 'cloud'"):
        CompileOptions.of(executor="cloud")
