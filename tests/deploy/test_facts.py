"""What a deployment is told of a bundle follows from its manifest: memory, and how long a start may take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from llmc.compiler.estimates.footprint import BASE_BYTES
from llmc.deploy.facts import LEAST_BUDGET_S, MARGIN
from llmc.errors import InputError
from tests.deploy.bundles import facts, files, on


def large(document: dict[str, Any]) -> None:
    """With weights of 4 GB."""
    on("onnxruntime")(document)
    document["blobs"][document["files"]["weights"]] = 4 * 10**9


def test_memory_is_files_cache_and_a_base(tmp_path: Path) -> None:
    bundle = facts(tmp_path / "bundle")
    limits = bundle.plan.limits
    held = limits.max_num_seqs * bundle.bundle.cache_shape.nbytes(limits.max_model_len, "f32")
    assert bundle.cache_bytes == held > 0
    assert 0 <= bundle.server.host_bytes - (bundle.manifest.size + held + BASE_BYTES) < 1 << 20
    assert bundle.server.host_bytes % (1 << 20) == 0


def test_a_device_with_memory_of_its_own_has_the_cache(tmp_path: Path) -> None:
    def deep(document: dict[str, Any]) -> None:
        document["model"].update(layers=1000, kv_heads=64)

    def deep_on_a_gpu(document: dict[str, Any]) -> None:
        deep(document)
        on("cuda:h100")(document)

    host, gpu = facts(tmp_path / "host", deep), facts(tmp_path / "gpu", deep_on_a_gpu)
    assert host.cache_bytes == gpu.cache_bytes > 2 << 20
    assert abs(host.server.host_bytes - gpu.server.host_bytes - host.cache_bytes) < 1 << 20


def test_a_start_takes_longer_with_more_to_read(tmp_path: Path) -> None:
    small, big = facts(tmp_path / "small", on("onnxruntime")), facts(tmp_path / "big", large)
    assert big.server.start_seconds > small.server.start_seconds + 4e9 / 100e6 - 1
    assert small.start_budget == LEAST_BUDGET_S
    assert big.start_budget == pytest.approx(MARGIN * big.server.start_seconds, abs=1)


def test_portable_executables_take_their_devices_time(tmp_path: Path) -> None:
    def portable(document: dict[str, Any]) -> None:
        on("hpu")(document)
        for executable in document["executables"]:
            executable["state"] = "portable"

    bundle = facts(tmp_path / "bundle", portable)
    assert bundle.portable == len(bundle.manifest.executables) > 0
    assert bundle.server.start_seconds > bundle.portable * 13


def test_the_startup_probe_waits_that_long_and_nothing_kills_before(tmp_path: Path) -> None:
    bundle = facts(tmp_path / "bundle", large)
    deployment = yaml.safe_load(files("kubernetes", bundle)["deployment.yaml"])
    server = deployment["spec"]["template"]["spec"]["containers"][0]
    startup = server["startupProbe"]
    allowed = startup["periodSeconds"] * startup["failureThreshold"]
    assert bundle.start_budget <= allowed < bundle.start_budget + startup["periodSeconds"]
    assert startup["httpGet"]["path"] == "/ready", "liveness is asked only once the server was ready"
    paths = [server[probe]["httpGet"]["path"] for probe in ("readinessProbe", "livenessProbe")]
    assert paths == ["/ready", "/health"]
    assert deployment["spec"]["progressDeadlineSeconds"] > allowed


def test_pods_are_closed(tmp_path: Path) -> None:
    found = files("kubernetes", facts(tmp_path / "bundle"))
    for path in ("deployment.yaml", "warm-up-job.yaml"):
        pod = yaml.safe_load(found[path])["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["automountServiceAccountToken"] is False
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] and security["capabilities"] == {"drop": ["ALL"]}
        assert not security["allowPrivilegeEscalation"]
    assert yaml.safe_load(found["network-policy.yaml"])["spec"]["egress"] == []


def test_the_autoscaler_requests_metrics_that_the_server_has(tmp_path: Path) -> None:
    from llmc.server.telemetry.metrics import Metrics

    names = {family.name for family in Metrics().collect()}
    found = files("kubernetes", facts(tmp_path / "bundle"))
    requested = {one["pods"]["metric"]["name"] for one in yaml.safe_load(found["autoscaler.yaml"])["spec"]["metrics"]}
    assert requested == {"llmc_num_requests_waiting", "llmc_num_requests_running"}
    rules = yaml.safe_load(found["prometheus-adapter-values.yaml"])["rules"]["custom"]
    assert {rule["name"]["as"] for rule in rules} == requested
    assert {rule["seriesQuery"].split('"')[1] for rule in rules} <= names


def test_what_holds_no_weights_is_not_deployed(tmp_path: Path) -> None:
    def unbound(document: dict[str, Any]) -> None:
        document["files"]["tensors.json"] = document["files"].pop("weights")

    with pytest.raises(InputError, match=r"has no weights .* compile the checkpoint"):
        facts(tmp_path / "bundle", unbound)
